"""Items of an encoder, and rows of a language model, that are split over processes.

Each process gets the features of all items.

Legend: ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.actors.sharding.sample_rows import (
    count_items,
    row_shares,
    shares,
    take_items,
    take_rows,
)
from raymm.actors.stages.draw_grids import rows_of_share
from raymm.errors import ModelError
from raymm.kernels.collectives.gather import gather_items
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.host_copies import on_host

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
