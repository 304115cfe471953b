"""Masks of text models that are called with a part of a batch's tokens, or with packed rows.

transformers makes a mask from the tokens that a text model is called with. After
:func:`enter_masks_of`, raymm's mask interface makes it from all tokens of the batch, which
attention needs if tokens are split over processes, or from rows packed as documents.

A model's forward also checks whether its mask hides any token, and whether position ids jump; each
check waits for the device. :class:`KnownMask` answers the first from a host copy,
:func:`no_packed_rows` the second.

Legend: ``B`` rows, ``T`` tokens of a row, ``P`` tokens of packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from raymm.kernels.host_copies import on_host, remember, to_device
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.convert import from_dense
from raymm.kernels.mask.mask import AttentionMask

_tokens_of_all: ContextVar[AllTokens | None] = ContextVar("tokens_of_all", default=None)


@dataclass(frozen=True)
class AllTokens:
    """Tokens that a mask covers.

    Attributes:
        padding: (B, T) bool, False for padding; None if all padding is on the right, where no token
            sees it.
        documents: lengths of packed rows; None if rows are not packed.
    """

    rows: int
    length: int
    padding: torch.Tensor | None = None
    documents: tuple[int, ...] | None = None

    def packed_mask(self, window: int | None) -> AttentionMask:
        """Return the mask of packed rows, causal within each, with an optional sliding window."""
        assert self.documents is not None
        mask = mask_patterns.documents(self.documents)
        return mask if window is None else mask.windowed(window)


def enter_masks_of(tokens: AllTokens | None) -> Callable[[], None]:
    """Make masks cover ``tokens`` from now on; None for those that a model is called with. Return a
    function that undoes this."""
    token = _tokens_of_all.set(tokens)
    return lambda: _tokens_of_all.reset(token)


def tokens_of_all() -> AllTokens | None:
    """Return the tokens that masks cover; None for those that a model is called with."""
    return _tokens_of_all.get()


def put_together(masks: tuple[AttentionMask, ...], tokens: torch.Tensor, length: int) -> (
    AttentionMask
):
    """Return the mask of packed rows, which see only themselves. Built densely, O(P * P).

    Args:
        masks: one for each row, or one for all.
        tokens: (P,) int64 on the host: the packed tokens, as indices into the flattened (B, T)
            rows.
    """
    rows, columns = tokens // length, tokens % length
    dense = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for row in rows.unique().tolist():
        in_row = rows == row
        mask = masks[row if len(masks) > 1 else 0].dense()
        row_columns = columns[in_row]
        start = int(in_row.nonzero()[0])
        stop = start + len(row_columns)
        dense[start:stop, start:stop] = mask[row_columns][:, row_columns]
    return from_dense(dense)


# Any, because type checkers take class attributes for those of instances.
_T: Any = torch.Tensor
_ANSWERS = {_T.all: torch.Tensor.all, _T.sum: torch.Tensor.sum}
_no_packed_rows: ContextVar[bool] = ContextVar("no_packed_rows", default=False)
_FIND = "find_packed_sequence_indices"


class KnownMask(torch.Tensor):
    """A (B, T) mask on a device that answers ``all`` and ``sum`` from its host copy. Other
    operations return ordinary tensors."""

    @staticmethod
    def of(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Move a (B, T) mask of integers or bools, whose values the host knows, to a device."""
        host = on_host(mask)
        if device.type == "cpu":
            return host
        moved = to_device(host, device).as_subclass(KnownMask)
        remember(moved, host)
        return moved

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ANSWERS and len(args) == 1 and not kwargs:
                return _ANSWERS[func](on_host(args[0]))
            result = func(*args, **kwargs)
            if func is not _T.to:
                return result
            cast = result.as_subclass(KnownMask)
            remember(cast, on_host(args[0]).to(result.dtype))
            return cast


@contextmanager
def no_packed_rows(certain: bool) -> Iterator[None]:
    """Context in which transformers does not search position ids for jumps, its sign of sequences
    packed into one row. ``certain`` is True if there are none, or a mask separates them; if it is
    False, transformers searches."""
    _patch()
    token = _no_packed_rows.set(certain)
    try:
        yield
    finally:
        _no_packed_rows.reset(token)


def _patch() -> None:
    find = getattr(masking_utils, _FIND, None)  # absent in some releases
    if find is None or getattr(find, "_raymm", False):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if _no_packed_rows.get() else find(position_ids)

    marked: Any = find_packed_sequence_indices
    marked._raymm = True
    setattr(masking_utils, _FIND, marked)
