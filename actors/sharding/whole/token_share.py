"""Some of a batch's tokens, of what a text model is called with.

A whole model's own forward puts its features among the embedded tokens, and calls its text model
with what is of tokens, in whatever shapes. A share takes of each such argument what is of its own
tokens; a probe compares what comes out with the same tokens of all.

Legend: ``B`` rows, ``T`` tokens of a row, ``b``, ``t`` those of a share, ``M`` marked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from raymm.errors import InputError
from raymm.kernels.hf.self_attention import ModelMask
from raymm.kernels.host_copies import to_device


class TokenShareError(InputError, ValueError):
    """A text model of whose arguments a part of the tokens cannot be taken."""


@dataclass(frozen=True)
class TokenShare:
    """Which tokens a process has. At most one of ``columns`` and ``packed`` is given.

    Attributes:
        shape: (B, T) of all.
        rows: of the rows; None for all.
        columns: (t,) int64 on the host, of each row the tokens; None for all.
        packed: (P,) int64 on the host: tokens of all rows as one row, counted row by row.
    """

    shape: tuple[int, int]
    rows: range | None = None
    columns: torch.Tensor | None = None
    packed: torch.Tensor | None = None

    def of_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a text model is called with of these tokens.

        Args:
            arguments: by name, what it is called with of all of them.

        Raises:
            TokenShareError: something of which tokens cannot be taken.
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
        """Of the rows; which of the tokens it is of, attention knows."""
        rows = self.rows
        if rows is None:
            return mask

        def build() -> Any:
            every = mask.masks
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
            raise TokenShareError(
                f"it is called with a tensor {tuple(value.shape)} for {rows} rows of {length} "
                "tokens, of which one row cannot be made"
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
                raise TokenShareError(
                    f"it is called with {name!r} {tuple(value.shape)}, of which every row has its "
                    "own"
                )
            if self.rows is not None:
                return value[self.rows.start : self.rows.stop]
        return value
