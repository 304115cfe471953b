"""Rows and tokens of a process within the microbatch, for slicing random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.modules.token_layout import PADDING
from raymm.kernels.host_copies import on_host
from raymm.kernels.shared_draws import Cut, Grid

DRAWN_ROWS = "drawn_rows"
"""Side tensor (2,) int64 on the host: first row of this process, and number of rows over all
processes that split them. For rows packed into one: first token and number of tokens.
"""


def rows_of_share(rows: range, merged: Mapping[str, Any], packing: bool) -> torch.Tensor:
    """Return :data:`DRAWN_ROWS` for the rows of a process.

    ``merged`` has ``targets`` (B, T) of all rows and, with packing, ``token_layout`` (3, B, T).
    """
    if not packing:
        return torch.tensor([rows.start, len(merged["targets"])], device="cpu")
    counts = (on_host(merged["token_layout"])[2] != PADDING).sum(dim=1)
    return torch.stack([counts[: rows.start].sum(), counts.sum()])


def sample_rows(context: MicrobatchContext, module: str, size: int) -> Cut:
    """Return the ``size`` rows of a stage's samples within the microbatch."""
    if not context.samples:
        return Cut.uncut(size)
    rows, offsets = context.own_rows(module), context.offsets.get(module)
    return Cut(size, offsets[-1] if offsets else context.sample_count, ((rows.lo, rows.hi),))


def share_of_rows(rows: Cut, start: int, size: int) -> Cut:
    """Return ``size`` rows of a stage, from its row ``start`` on, within the microbatch."""
    first = rows.ranges[0][0] + start
    return Cut.from_range(first, first + size, rows.whole)


def text_grid(
    context: MicrobatchContext, shape: Sequence[int], drawn: torch.Tensor | None,
    tokens: Cut | None, packing: bool,
) -> Grid:
    """Return the rows and tokens of a language model's process.

    Args:
        shape: (b, t) of the process.
        drawn: :data:`DRAWN_ROWS`; None if the stage's rows are not split over processes.
        tokens: the tokens of each row that the process has; None for all.
    """
    b, t = shape
    tokens = tokens or Cut.uncut(t)
    if packing and context.samples:  # the token counts of the other samples are unknown
        return Grid(Cut.uncut(b), Cut(t, 0, ()))
    if drawn is None:
        return Grid(sample_rows(context, "", b), tokens)
    start, count = drawn.tolist()
    if not packing:
        rows = sample_rows(context, "", count)
        return Grid(share_of_rows(rows, start, b), tokens)
    packed = [(lo, min(hi, tokens.whole)) for lo, hi in tokens.ranges if lo < tokens.whole]
    ranges = tuple((start + lo, start + hi) for lo, hi in packed)
    return Grid(Cut.uncut(b), Cut(t, count, ranges))
