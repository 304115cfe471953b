"""Selection of a process's tokens from the arguments of a text model, in various shapes.

A probe compares the results with the same tokens of the complete model.

Legend: ``B`` rows, ``T`` tokens of a row, ``b``, ``t`` those of a share, ``M`` marked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from raymm.errors import ModelError
from raymm.kernels.context_parallel.layout import ContextLayout, join_ranges
from raymm.kernels.hf.self_attention import ModelMask
from raymm.kernels.hf.text_masks import AllTokens, put_together
from raymm.kernels.host_copies import to_device
from raymm.kernels.mask.mask import AttentionMask


@dataclass(frozen=True)
class TokenShare:
    """Tokens of a process: some columns of some rows, or, with ``packed``, tokens of rows packed
    into one.

    Attributes:
        shape: (B, T) of the batch.
        rows: None for all.
        columns: (t,) int64 on the host, the tokens of each row; None for all.
        packed: (p,) int64 on the host, tokens in the packed row, as row-major indices.
        documents: (P,) int64, as ``packed``, for all processes that split the packed row.
    """

    shape: tuple[int, int]
    rows: range | None = None
    columns: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def is_of_tokens(self) -> bool:
        """True if the tokens attend to another set of tokens than the text model's inputs."""
        return self.columns is not None or self.packed is not None

    def all_tokens(self, real: torch.Tensor | None) -> AllTokens | None:
        """Return the tokens that attention masks cover; None if they are the share's own.

        ``real`` is (B, T) on the host, 0 for padding; None without padding.
        """
        rows, length = self.shape
        if self.documents is not None:
            return AllTokens(1, len(self.documents), documents=self.lengths())
        if self.columns is None:
            return None
        local_rows = self.rows or range(rows)
        if real is not None:
            real = real.bool()[local_rows.start : local_rows.stop]
            if not bool((real[:, 1:] & ~real[:, :-1]).any()):
                real = None  # padding on the right is never seen
        return AllTokens(len(local_rows), length, real)

    def lengths(self) -> tuple[int, ...] | None:
        """Return the lengths of the packed row's documents; None without packing."""
        if self.documents is None:
            return None
        rows, length = self.shape
        counts = torch.bincount(self.documents // length, minlength=rows).tolist()
        return tuple(count for count in counts if count)

    def of_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Select the tokens from the arguments of a text model.

        Raises:
            ModelError: tokens of an argument cannot be selected.
        """
        marks = [value for value in arguments.values() if self._is_mark(value)]
        return {name: self._of(name, value, marks) for name, value in arguments.items()}

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (b, t, ...)."""
        return self._select(values, 0, 1)

    def _is_mark(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and value.dtype is torch.bool
            and tuple(value.shape) == self.shape
        )

    def _of(self, name: str, value: Any, marks: list[torch.Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._of(name, entry, marks) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._of(name, entry, marks) for entry in value)
        if isinstance(value, ModelMask):
            return self._of_mask(value)
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if (dims := self._token_dims(value)) is not None:
            return self._select(value, *dims)
        for mark in marks:
            if len(value) == int(mark.sum()):
                return self._of_marked(value, mark)
        return self._of_rest(name, value)

    def _of_mask(self, mask: ModelMask) -> ModelMask:
        """Select the mask's rows; attention itself knows the process's tokens."""
        rows, documents = self.rows, self.documents
        if rows is None and documents is None:
            return mask

        def build() -> tuple[AttentionMask, ...]:
            every = mask.masks
            if documents is not None:
                return (put_together(every, documents, self.shape[1]),)
            assert rows is not None
            return every if len(every) == 1 else every[rows.start : rows.stop]

        return replace(mask, build=build)

    def _token_dims(self, value: torch.Tensor) -> tuple[int, int] | None:
        """Return the row and token dimensions; only dimensions of length one may lie between."""
        rows, length = self.shape
        for first in range(value.dim() - 1):
            if value.shape[first] not in (1, rows):
                continue
            second = first + 1
            while value.shape[second] == 1 != length and second < value.dim() - 1:
                second += 1
            if value.shape[second] == length:
                return first, second
        return None

    def _select(self, value: torch.Tensor, first: int, second: int) -> torch.Tensor:
        rows, length = self.shape
        if self.packed is None:
            if self.rows is not None and value.shape[first] == rows:
                value = value.narrow(first, self.rows.start, len(self.rows))
            if self.columns is not None:
                value = value.index_select(second, to_device(self.columns, value.device))
            return value
        if second != first + 1:
            raise ModelError(
                f"it is called with a tensor {tuple(value.shape)}, which cannot be packed into one "
                f"row, for {rows} rows of {length} tokens"
            )
        shape = [*value.shape]
        shape[first] = rows
        flat = value.expand(shape).flatten(first, second)
        return flat.index_select(first, to_device(self.packed, value.device)).unsqueeze(first)

    def _of_marked(self, value: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        """Select from (M, ...), which has the tokens marked by a (B, T) mask, in order."""
        numbers = mark.flatten().cumsum(0).sub(1).view(self.shape)
        is_marked = self.of_tokens(mark)
        return value.index_select(0, self.of_tokens(numbers)[is_marked])

    def _of_rest(self, name: str, value: torch.Tensor) -> torch.Tensor:
        rows, length = self.shape
        if tuple(value.shape) == (length,):  # common to all rows
            if self.columns is not None:
                return value[to_device(self.columns, value.device)]
            if self.packed is not None:
                return value[to_device(self.packed % length, value.device)]
            return value
        if len(value) == rows and value.dim() > 1:
            if self.packed is not None:
                raise ModelError(
                    f"it is called with {name!r} {tuple(value.shape)}, which has separate values "
                    "for every row and cannot be packed"
                )
            if self.rows is not None:
                return value[self.rows.start : self.rows.stop]
        return value


def packed_tokens(
    shape: tuple[int, int], real: torch.Tensor | None, rows: range | None = None
) -> torch.Tensor:
    """Return row-major indices, (P,) int64, of tokens of (B, T) that are not padding.

    ``real`` is (B, T) on the host, 0 for padding. ``rows`` restricts the rows.
    """
    marked = torch.ones(shape, dtype=torch.bool) if real is None else real.bool()
    if rows is not None:
        selected = torch.zeros_like(marked)
        selected[rows.start : rows.stop] = marked[rows.start : rows.stop]
        marked = selected
    return marked.flatten().nonzero()[:, 0]


def zigzag(length: int, processes: int) -> ContextLayout:
    """Return each process's tokens: a range from the front and one from the back of a row.

    This balances causal masks and depends on the length only, so receivers know shapes.

    Raises:
        ModelError: there are fewer tokens than processes.
    """
    if length < processes:
        raise ModelError(
            f"a batch with {length} tokens per row cannot be split over {processes} processes; "
            "accepted: at least one token per process"
        )
    count = 2 * processes if length >= 2 * processes else processes
    edges = [length * n // count for n in range(count + 1)]
    ranges = list(pairwise(edges))
    if count == processes:
        return ContextLayout(tuple((token_range,) for token_range in ranges))
    return ContextLayout(
        tuple(join_ranges((ranges[n], ranges[-1 - n])) for n in range(processes))
    )
