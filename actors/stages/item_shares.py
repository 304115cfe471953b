"""Items of an encoder, and rows of a language model, that are split over processes: which of them a
process has, and their position within the microbatch, for slicing random numbers.

Each process gets the features of all items.

Legend: ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.modules.token_layout import PADDING
from raymm.actors.sharding.sample_rows import (
    count_items,
    row_shares,
    shares,
    take_items,
    take_rows,
)
from raymm.errors import ModelError
from raymm.kernels.collectives.gather import gather_items
from raymm.kernels.collectives.p2p import Exchange
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


# Side tensor: total number of items, over all processes.
ITEMS = "items/of_all"


class ItemShares:
    """Position of a process among those that split a module's items."""

    def __init__(self, module: str, exchange: Exchange) -> None:
        self._module, self._exchange = module, exchange

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def rank(self) -> int:
        """Rank of this process among them."""
        return self._exchange.rank

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self._exchange.size

    def own_inputs(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the inputs (N, ...) of this process's items, or of item 0 if it has none, and N.
        """
        count = count_items(inputs, self._module)
        return take_items(inputs, shares(count, self._exchange.size)[self.rank]), count

    def own(self, side: Mapping[str, torch.Tensor]) -> range:
        """Return the indices of this process's items."""
        return self._all(side)[self.rank]

    def whole(self, own: torch.Tensor, side: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Gather the items of all processes as (N, ...). All processes must call it together.

        Raises:
            ModelError: ``own`` does not have one row per item of this process (at least one row).
        """
        items = len(self.own(side))
        if len(own) != max(items, 1):
            raise ModelError(
                f"{self._module!r} returns features of shape {tuple(own.shape)} for "
                f"{max(items, 1)} items; with sharding 'fsdp' it must return (items, tokens, width)"
            )
        sizes = [len(share) for share in self._all(side)]
        return gather_items(own[:items], sizes, self._exchange)

    def _all(self, side: Mapping[str, torch.Tensor]) -> list[range]:
        return shares(int(on_host(side[ITEMS])), self._exchange.size)


class RowShares:
    """Rows of a microbatch of a language model; one process has all until :meth:`share`.

    Args:
        together: number of adjacent rows that stay on one process.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._exchange: Exchange | None = None

    @property
    def is_split(self) -> bool:
        return self._exchange is not None

    def share(self, exchange: Exchange) -> None:
        """Split the rows over the processes of an exchange."""
        self._exchange = exchange

    def own(self, count: int) -> range:
        """Return the rows of this process, of ``count``."""
        if self._exchange is None:
            return range(count)
        return row_shares(count, self._exchange.size, self._together)[self._exchange.rank]

    def take(
        self, merged: dict[str, Any], packing: bool
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return the entries of this process's rows (:func:`take_rows`), and, if rows are split,
        their position for random numbers (:func:`rows_of_share`)."""
        if self._exchange is None:
            return merged, None
        drawn = rows_of_share(self.own(len(merged["targets"])) or range(1), merged, packing)
        rank, size = self._exchange.rank, self._exchange.size
        return take_rows(merged, rank, size, self._together), drawn
