"""Masks of text models that are called with a part of a batch's tokens, or with packed rows.

transformers makes a mask from the tokens that a text model is called with. After
:func:`enter_masks_of`, raymm's mask interface makes it from all tokens of the batch, which
attention needs if tokens are split over processes, or from rows packed as documents.

Legend: ``B`` rows, ``T`` tokens of a row, ``P`` tokens of packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import torch

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
