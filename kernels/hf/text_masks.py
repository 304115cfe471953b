"""Masks of text models that are called with some of a batch's tokens, or with rows put together.

transformers makes a mask from the tokens that a text model is called with. After
:func:`enter_masks_of`, raymm's mask interface makes it of the tokens that there are in all, as
attention wants it where processes share them, or of rows that lie one after another as documents.

Legend: ``B`` rows, ``T`` tokens of a row, ``P`` tokens of rows put together.
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
    """The tokens that a mask is of.

    Attributes:
        rows: B.
        length: T.
        padding: (B, T) bool, False for padding that is not on the right alone, as what is on the
            right no token sees anyhow; None without.
        documents: of rows that were put together, how long each is; None where they were not.
    """

    rows: int
    length: int
    padding: torch.Tensor | None = None
    documents: tuple[int, ...] | None = None

    def packed_mask(self, window: int | None) -> AttentionMask:
        """Of rows put together, causal in each.

        Args:
            window: tokens that a row sees at most; None for all before it.
        """
        assert self.documents is not None
        mask = mask_patterns.documents(self.documents)
        return mask if window is None else mask.windowed(window)


def enter_masks_of(tokens: AllTokens | None) -> Callable[[], None]:
    """From now on masks are of these tokens, whatever a model is called with.

    Args:
        tokens: None for those that it is called with.

    Returns:
        What ends it.
    """
    token = _tokens_of_all.set(tokens)
    return lambda: _tokens_of_all.reset(token)


def tokens_of_all() -> AllTokens | None:
    """What masks are to be of; None for what a model is called with."""
    return _tokens_of_all.get()


def put_together(masks: tuple[AttentionMask, ...], tokens: torch.Tensor, length: int) -> (
    AttentionMask
):
    """The mask of rows put together, of which none sees another's tokens; built densely,
    O(P * P).

    Args:
        masks: of each row, or one for all.
        tokens: (P,) int64 on the host, counted row by row, which there are of the rows.
        length: T.
    """
    rows, columns = tokens // length, tokens % length
    dense = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for row in rows.unique().tolist():
        own = rows == row
        mask = masks[row if len(masks) > 1 else 0].dense()
        among = columns[own]
        start = int(own.nonzero()[0])
        stop = start + len(among)
        dense[start:stop, start:stop] = mask[among][:, among]
    return from_dense(dense)
