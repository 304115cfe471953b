"""One forward and one backward of a stage for a group of microbatches.

The inputs of the group are concatenated by items, and every microbatch gets its items of the
output as separate leaves. Their gradients are concatenated once the last of them is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.message import Message
from raymm.errors import ModelError

Row = Mapping[str, Any] | None


def group_of(rows: Sequence[Row], microbatch: int, span: int) -> tuple[int, ...]:
    """Return the microbatches that share a forward with ``microbatch``, ascending: those of its
    ``span`` with inputs of the same names, dtypes and item shapes, because items are never padded.
    """
    first = microbatch - microbatch % span
    signature = _signature(rows[microbatch])
    return tuple(
        number for number in range(first, min(first + span, len(rows)))
        if number == microbatch or _signature(rows[number]) == signature
    )


def _signature(row: Row) -> object:
    if row is None:
        return None
    return tuple(
        (name, value.dtype, tuple(value.shape[1:])) if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in sorted(row.items())
    )


def joined_inputs(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """Return the concatenated inputs of the microbatches of a group, and the items of each."""
    counts = [
        next(len(value) for value in row.values() if isinstance(value, torch.Tensor))
        for row in rows
    ]
    first = rows[0]
    return {
        name: torch.cat([row[name] for row in rows]) if isinstance(value, torch.Tensor) else value
        for name, value in first.items()
    }, counts


class GroupRun:
    """Output of a group's forward, until its backward.

    Attributes:
        parts: output of each microbatch.

    Raises:
        ModelError: the output does not have one row per item.
    """

    def __init__(
        self, module: str, output: Message, counts: Sequence[int], with_grad: bool
    ) -> None:
        total = sum(counts)
        if output.side or output.loss is not None or any(
            len(tensor) != total for tensor in output.tensors
        ):
            shapes = [tuple(tensor.shape) for tensor in output.tensors]
            raise ModelError(
                f"{module!r} returns features of shapes {shapes} for {total} items; with "
                "microbatch_factor above 1, accepted: one row per item (items, tokens, width)"
            )
        self._output = output.tensors
        self._open = len(counts)
        tensors = [tensor.detach().split(list(counts)) for tensor in output.tensors]
        self.parts = [
            output._replace(tensors=tuple(
                # A separate leaf, which does not record that it is a view.
                part.detach().requires_grad_(with_grad and tensor.requires_grad)
                for part, tensor in zip(parts, output.tensors, strict=True)
            ))
            for parts in zip(*tensors, strict=True)
        ]

    def last_use(self) -> bool:
        """Count a microbatch that no longer needs the group; return True for the last one."""
        self._open -= 1
        return not self._open

    def gradients(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the outputs that need a gradient, with the gradients, and release both. An output
        without any gradient is left out."""
        outputs, gradients = [], []
        for number, output in enumerate(self._output):
            leaves = [part.tensors[number] for part in self.parts]
            if any(leaf.grad is not None for leaf in leaves):
                outputs.append(output)
                gradients.append(torch.cat([
                    torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
                ]))
        self._output, self.parts = (), []
        return tuple(outputs), tuple(gradients)
