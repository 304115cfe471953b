"""Conversion of a tower's output to message tensors and back.

A tower returns a structure: a model output, or a list with an entry per image. Lists of tensors
that differ in their first dimension are sent as one tensor plus the row count of each entry. Only
entries that the model reads are sent; the receiver gets None for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from raymm.errors import ModelError
from raymm.kernels.host_copies import on_host, to_device

_ROWS = "rows/"


@dataclass(frozen=True)
class Leaf:
    """Leaf of a tower's output structure, with whether the model reads it.

    ``kind`` is ``tensor``; ``list`` or ``tuple`` of tensors with equal row shapes; or ``value``.
    """

    kind: str
    value: Any = None
    read: bool = True


@dataclass(frozen=True)
class Form:
    """Structure of a tower's output, the same for all microbatches.

    Attributes:
        fields: the fields of a model output that are read; None for all, or for other outputs.
        more: True to also send tensor attributes that are not fields of the model output's class.
    """

    tree: TreeSpec
    leaves: tuple[Leaf, ...]
    fields: tuple[str, ...] | None = None
    more: bool = False

    @classmethod
    def of(cls, output: Any, fields: tuple[str, ...] | None = None) -> Form:
        """Return the structure of an output; only the given fields are read (None: all)."""
        leaves, tree = tree_flatten(_shown(output, fields), _is_leaf)
        has_extras = bool(beside_fields(output))
        return cls(tree, tuple(_leaf(value) for value in leaves), fields, has_extras)

    def reading(self, read: Sequence[bool]) -> Form:
        """Return the same structure with other ``read`` flags, one per leaf."""
        return Form(self.tree, tuple(
            Leaf(leaf.kind, leaf.value, is_read)
            for leaf, is_read in zip(self.leaves, read, strict=True)
        ), self.fields, self.more)  # fmt: skip

    def like(self, output: Any) -> Form:
        """Return the structure for a model of another depth, with the same fields read."""
        return self if self.fields is None else Form.of(output, self.fields)

    def tensors(self, output: Any) -> list[torch.Tensor | None]:
        """Return one tensor per leaf of an output: lists are concatenated, constants are None.

        Raises:
            ModelError: the output has another structure.
        """
        values, tree = tree_flatten(_shown(output, self.fields), _is_leaf)
        kinds = [_leaf(value).kind for value in values]
        if tree != self.tree or kinds != [leaf.kind for leaf in self.leaves]:
            raise ModelError(f"features have the structure {tree}; expected {self.tree}")
        return [
            value if isinstance(value, torch.Tensor)
            else None if leaf.kind == "value" else torch.cat(list(value))
            for value, leaf in zip(values, self.leaves, strict=True)
        ]

    def packed(self, output: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Return the floating-point tensors to send, and the other tensors by name.

        Raises:
            ModelError: the output has another structure.
        """
        tensors, side = [], {}
        values = tree_flatten(_shown(output, self.fields), _is_leaf)[0]
        for n, (value, tensor) in enumerate(zip(values, self.tensors(output), strict=True)):
            if tensor is None or not self.leaves[n].read:
                continue
            if self.leaves[n].kind != "tensor":
                side[f"{_ROWS}{n}"] = torch.tensor([len(entry) for entry in value], device="cpu")
            if tensor.is_floating_point():
                tensors.append(tensor)
            else:
                side[str(n)] = tensor
        return tuple(tensors), side

    def unpacked(self, tensors: Sequence[torch.Tensor], side: Mapping[str, torch.Tensor]) -> Any:
        """Rebuild the output from the return value of :meth:`packed`."""
        travelling = dict(self._travelling(tensors, side))
        values: list[Any] = []
        for n, leaf in enumerate(self.leaves):
            if n not in travelling:
                values.append(leaf.value)
                continue
            tensor = travelling[n]
            if tensor.device.type == "cpu" and tensors:
                tensor = to_device(tensor, tensors[0].device)
            if leaf.kind == "tensor":
                values.append(tensor)
                continue
            entries = tensor.split(on_host(side[f"{_ROWS}{n}"]).tolist())
            values.append(list(entries) if leaf.kind == "list" else tuple(entries))
        if not self.more:
            return tree_unflatten(values, self.tree)
        output, extras = tree_unflatten(values, self.tree)
        vars(output).update(extras)
        return output

    def parts(
        self, tensors: Sequence[torch.Tensor], side: Mapping[str, torch.Tensor],
        layers: Collection[int] = (),
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return :meth:`packed` tensors in a form that can be concatenated over outputs in
        dimension 0.

        Args:
            layers: leaves that are lists with an entry per layer, each with the features of all
                items; other lists have an entry per item.

        Raises:
            ModelError: the entries of such a leaf differ in length.
        """
        parts = []
        for n, tensor in self._travelling(tensors, side):
            if self.leaves[n].kind == "tensor":
                parts.append(tensor)
                continue
            rows = on_host(side[f"{_ROWS}{n}"])
            if n not in layers:
                parts += [tensor, rows]
                continue
            if len(set(rows.tolist())) > 1:
                raise ModelError(
                    f"feature maps of one batch have {rows.tolist()} rows; accepted: the same "
                    "number for every layer"
                )
            parts.append(tensor.unflatten(0, (len(rows), -1)).transpose(0, 1))
        return parts

    def of_parts(
        self, parts: Sequence[torch.Tensor], side: Mapping[str, torch.Tensor],
        layers: Collection[int] = (),
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:  # fmt: skip
        """Invert :meth:`parts`, for parts of all items and side tensors of some of them."""
        ready, tensors, full_side = iter(parts), [], dict(side)
        for n, leaf in enumerate(self.leaves):
            if leaf.kind == "value" or not leaf.read:
                continue
            tensor, name = next(ready), f"{_ROWS}{n}"
            if n in layers:
                full_side[name] = torch.full_like(side[name], len(tensor))
                tensor = tensor.transpose(0, 1).flatten(0, 1)
            elif leaf.kind != "tensor":
                full_side[name] = next(ready)
            if str(n) in side:
                full_side[str(n)] = tensor
            else:
                tensors.append(tensor)
        return tuple(tensors), full_side

    def _travelling(
        self, tensors: Sequence[torch.Tensor], side: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the leaves that are sent, with their numbers."""
        ready = iter(tensors)
        for n, leaf in enumerate(self.leaves):
            if leaf.kind != "value" and leaf.read:
                tensor = side.get(str(n))
                yield n, next(ready) if tensor is None else tensor

    def shapes(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the shapes of the floating-point tensors, for stages without their values."""
        return {
            f"shape/{str(t.dtype).removeprefix('torch.')}/{n}": torch.tensor(t.shape, device="cpu")
            for n, t in enumerate(tensors)
        }


def beside_fields(output: Any) -> dict[str, Any]:
    """Return the tensor attributes of a model output that are not fields of its class."""
    if not isinstance(output, Mapping):
        return {}
    return {
        name: value for name, value in getattr(output, "__dict__", {}).items()
        if isinstance(value, torch.Tensor) and name not in output
    }


def _shown(output: Any, fields: tuple[str, ...] | None) -> Any:
    extras = beside_fields(output)
    if fields is not None:
        output = type(output)(**{n: output.get(n) for n in fields if n not in extras})
    chosen = {name: value for name, value in extras.items() if fields is None or name in fields}
    return (output, chosen) if extras else output


def _is_leaf(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return (
        type(value) in (list, tuple) and len(value) > 0
        and all(isinstance(entry, torch.Tensor) and entry.dim() > 0 for entry in value)
        and len({(entry.shape[1:], entry.dtype) for entry in value}) == 1
    )


def _leaf(value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf("tensor")
    if _is_leaf(value):
        return Leaf(type(value).__name__)
    return Leaf("value", value)


class ReceivedFeatures:
    """Replacement for a tower's call on language model ranks; returns the received features."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._output: Any = None

    def receive(self, output: Any) -> None:
        """Set the output of the following calls; None if there are no items."""
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._output is None:
            raise ModelError(
                f"the model calls {self._name!r} for features, but the microbatch has no items for "
                "it"
            )
        return self._output
