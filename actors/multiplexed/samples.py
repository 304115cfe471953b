"""Samples of one producer's output on one GPU, as they come from others, and their gradients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from raymm.actors.modules.node import OutputError, Tensors
from raymm.kernels.collectives.waiting import Waitable, wait
from raymm.scheduler.graph.sample_ranges import Range

# A layout travels as JSON in a message of this many bytes.
LAYOUT_BYTES = 4096


class Field(NamedTuple):
    """A named tensor of an output, without its samples: (n, *shape)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad: bool


class Layout(NamedTuple):
    """What an output looks like; the same on all GPUs."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """That of these tensors."""
        return cls(tuple(
            Field(name, tuple(t.shape[1:]), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in tensors.items()
        ))

    @property
    def gradients(self) -> tuple[Field, ...]:
        """Fields that have a gradient."""
        return tuple(field for field in self.fields if field.grad)

    def encode(self) -> torch.Tensor:
        """As (LAYOUT_BYTES,) uint8.

        Raises:
            OutputError: it is too long.
        """
        data = json.dumps(self.fields).encode()
        if len(data) > LAYOUT_BYTES:
            raise OutputError(
                f"the description of outputs {[f.name for f in self.fields]} has {len(data)} "
                f"bytes; accepted: at most {LAYOUT_BYTES}. Hand on fewer outputs"
            )
        return torch.frombuffer(bytearray(data.ljust(LAYOUT_BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> Layout:
        """Inverse of :meth:`encode`."""
        listed = json.loads(bytes(data.cpu().tolist()))
        return cls(tuple(Field(n, tuple(shape), dtype, grad) for n, shape, dtype, grad in listed))


def empty(fields: Iterable[Field], size: int, device: torch.device) -> Tensors:
    """Tensors (size, *shape) to be written.

    Args:
        fields: name, shape of a row and dtype of each.
        size: rows.
        device: where they are.
    """
    return {
        field.name: torch.empty(
            (size, *field.shape), dtype=getattr(torch, field.dtype), device=device
        )
        for field in fields
    }


class KnownLayout(NamedTuple):
    """A layout, and the GPU that first said so."""

    layout: Layout
    gpu: int

    def check(self, node: str, layout: Layout, gpu: int) -> None:
        """Whether a GPU has the same.

        Args:
            node: whose outputs these are.
            layout: that the GPU has.
            gpu: its number.

        Raises:
            OutputError: it is another one.
        """
        if layout == self.layout:
            return
        if gpu == self.gpu:
            raise OutputError(
                f"outputs of {node!r} are {layout.fields}, and were {self.layout.fields} for "
                "inputs of the same shapes; accepted: shapes that follow from those of the batch"
            )
        raise OutputError(
            f"outputs of {node!r} are {layout.fields} on GPU {gpu} and {self.layout.fields} on GPU "
            f"{self.gpu}; accepted: shapes that follow from those of the batch, not from the "
            "samples that a GPU has"
        )


class Samples:
    """What a GPU has of one producer's output.

    Args:
        layout: of the output.
        ranges: its rows (:func:`raymm.scheduler.graph.sample_ranges.rows_of`); ascending and
            apart.
        device: where they are.

    Attributes:
        present: outputs that a reader here had a gradient for; of others it is zero, and in one
            process there would be none.
    """

    def __init__(self, layout: Layout, ranges: Sequence[Range], device: torch.device) -> None:
        self.layout = layout
        self._ranges = tuple(ranges)
        self._values = [empty(layout.fields, rows.size, device) for rows in ranges]
        self._gradients: list[Tensors | None] = [None] * len(ranges)
        self._works: list[Waitable] = []
        self.present: set[str] = set()

    def await_writes(self, works: Iterable[Waitable]) -> None:
        """Messages that write values; :meth:`wait` waits for them."""
        self._works += works

    def wait(self) -> None:
        """Until all values are there."""
        for work in self._works:
            wait(work)
        self._works.clear()

    def values(self, rows: Range) -> Tensors:
        """Views of these rows."""
        return self._views(self._values, rows)

    def put(self, rows: Range, tensors: Tensors) -> None:
        """Take over values; without a copy where they are all rows of a range."""
        with torch.no_grad():
            if rows in self._ranges:
                held = {name: tensor.detach() for name, tensor in tensors.items()}
                self._values[self._ranges.index(rows)] = held
                return
            for name, view in self.values(rows).items():
                view.copy_(tensors[name].detach())

    def add_gradient(self, rows: Range, gradients: Tensors) -> None:
        """Add a reader's part of the gradient."""
        self.present |= gradients.keys()
        for name, view in self.gradient(rows).items():
            if name in gradients:
                view.add_(gradients[name])

    def gradient(self, rows: Range) -> Tensors:
        """Views of what has been added so far, zero at first."""
        index, _ = self._place(rows)
        if self._gradients[index] is None:
            values = self._values[index]
            self._gradients[index] = {
                field.name: torch.zeros_like(values[field.name])
                for field in self.layout.gradients
            }
        return self._views(self._gradients, rows)

    def _place(self, rows: Range) -> tuple[int, int]:
        for index, held in enumerate(self._ranges):
            if held.holds(rows):
                return index, held.lo
        raise IndexError(f"rows {rows} are not in {self._ranges}")

    def _views(self, held: Sequence[Tensors | None], rows: Range) -> Tensors:
        index, start = self._place(rows)
        tensors = held[index]
        assert tensors is not None  # see gradient
        return {
            name: tensor[rows.lo - start : rows.hi - start]
            for name, tensor in tensors.items()
        }
