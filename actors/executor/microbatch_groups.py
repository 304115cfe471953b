"""One forward and one backward of a stage for a group of microbatches.

The inputs of the group are concatenated by items, and every microbatch gets its items of the
output. Gradients add up in the group's output until the last microbatch's is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.message import Message

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


def joined_inputs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the concatenated inputs of the microbatches of a group."""
    return {
        name: torch.cat([row[name] for row in rows]) if isinstance(value, torch.Tensor) else value
        for name, value in rows[0].items()
    }


class GroupRun:
    """Output of a group's forward, until its backward.

    Args:
        split: returns the messages of the microbatches, given that of the group.
        with_grad: True if a backward follows.

    Attributes:
        parts: output of each microbatch.
    """

    def __init__(
        self, output: Message, split: Callable[[Message], list[Message]], with_grad: bool
    ) -> None:
        self._outputs = output.tensors
        self._leaves = tuple([
            t.detach().requires_grad_(with_grad and t.requires_grad) for t in output.tensors
        ])
        self.parts = split(output._replace(tensors=self._leaves))
        self._open = len(self.parts)

    def last_use(self) -> bool:
        """Count a microbatch that no longer needs the group; return True for the last one."""
        self._open -= 1
        return not self._open

    def gradients(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the outputs that have a gradient, with the gradients."""
        pairs = [
            (output, leaf.grad) for output, leaf in zip(self._outputs, self._leaves, strict=True)
            if leaf.grad is not None
        ]
        return tuple([output for output, _ in pairs]), tuple([grad for _, grad in pairs])
