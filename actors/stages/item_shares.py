"""Items of an encoder that are split over processes; each process gets the features of all items.

Legend: ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.actors.sharding.sample_rows import count_items, shares, take_items
from raymm.errors import ModelError
from raymm.kernels.collectives.gather_items import gather_items
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
