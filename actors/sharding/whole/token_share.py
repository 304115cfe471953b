"""Some of a batch's tokens, of what a text model is called with.

A whole model's own forward puts its features among the embedded tokens, and calls its text model
with what is of tokens, in whatever shapes. A share takes of each such argument what is of its own
tokens; a probe compares what comes out with the same tokens of all.

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
    """Which tokens a process has. Without ``packed``, some columns of some rows; with it, rows
    are put together as one.

    Attributes:
        shape: (B, T) of all.
        rows: of the rows; None for all.
        columns: (t,) int64 on the host, of each row the tokens; None for all.
        packed: (p,) int64 on the host, counted row by row: which tokens lie in the one row.
        documents: (P,) int64, as ``packed``, those of all processes that share the one row's
            tokens.
    """

    shape: tuple[int, int]
    rows: range | None = None
    columns: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def is_of_tokens(self) -> bool:
        """Whether its tokens attend to others than those that the text model is called with, or
        not to all of these."""
        return self.columns is not None or self.packed is not None

    def all_tokens(self, real: torch.Tensor | None) -> AllTokens | None:
        """What attention's masks are of; None where they are of the share's own tokens.

        Args:
            real: (B, T) on the host, 0 for padding; None if there is none.
        """
        rows, length = self.shape
        if self.documents is not None:
            return AllTokens(1, len(self.documents), documents=self.lengths())
        if self.columns is None:
            return None
        own = self.rows or range(rows)
        if real is not None:
            real = real.bool()[own.start : own.stop]
            if not bool((real[:, 1:] & ~real[:, :-1]).any()):
                real = None  # on the right: nobody sees it
        return AllTokens(len(own), length, real)

    def lengths(self) -> tuple[int, ...] | None:
        """Of the documents of the one row; None where rows are not put together."""
        if self.documents is None:
            return None
        rows, length = self.shape
        counts = torch.bincount(self.documents // length, minlength=rows).tolist()
        return tuple(count for count in counts if count)

    def of_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a text model is called with of these tokens.

        Args:
            arguments: by name, what it is called with of all of them.

        Raises:
            ModelError: something of which tokens cannot be taken.
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
        """Of the rows; which of their tokens the process has, attention knows."""
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
        """The dimensions of rows and of tokens, among which are none but of length one."""
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
        """(M, ...), of the tokens that a mask (B, T) marks, in order."""
        numbers = mark.flatten().cumsum(0).sub(1).view(self.shape)
        own = self.of_tokens(mark)
        return value.index_select(0, self.of_tokens(numbers)[own])

    def _of_rest(self, name: str, value: torch.Tensor) -> torch.Tensor:
        rows, length = self.shape
        if tuple(value.shape) == (length,):  # the same for all rows
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
    """Tokens that are no padding, counted row by row: (P,) int64.

    Args:
        shape: (B, T).
        real: (B, T) on the host, 0 for padding; None if there is none.
        rows: of which there are to be any; None for all.
    """
    marked = torch.ones(shape, dtype=torch.bool) if real is None else real.bool()
    if rows is not None:
        own = torch.zeros_like(marked)
        own[rows.start : rows.stop] = marked[rows.start : rows.stop]
        marked = own
    return marked.flatten().nonzero()[:, 0]


def zigzag(length: int, processes: int) -> ContextLayout:
    """Which of a row's tokens each process has: two stretches, one from the front and one from the
    back, so that under a causal mask all have as much to do. It follows from the length alone,
    as messages need shapes that depend on shapes only.

    Args:
        length: T, a token for each process at least.
        processes: n.

    Raises:
        ModelError: there are fewer tokens.
    """
    if length < processes:
        raise ModelError(
            f"a batch with {length} tokens per row cannot be split over {processes} processes; "
            "accepted: at least one token per process"
        )
    parts = 2 * processes if length >= 2 * processes else processes
    edges = [length * n // parts for n in range(parts + 1)]
    ranges = list(pairwise(edges))
    if parts == processes:
        return ContextLayout(tuple((own,) for own in ranges))
    return ContextLayout(
        tuple(join_ranges((ranges[n], ranges[-1 - n])) for n in range(processes))
    )
