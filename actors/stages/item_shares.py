"""An encoder's items that processes share: each computes its own ones, and all get the whole.

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

# The side tensor with the number of items that processes share.
ITEMS = "items/of_all"


class ItemShares:
    """The place of a process among those that share a module's items.

    Args:
        module: whose items.
        exchange: the processes.
    """

    def __init__(self, module: str, exchange: Exchange) -> None:
        self._module, self._exchange = module, exchange

    @property
    def exchange(self) -> Exchange:
        """The processes."""
        return self._exchange

    @property
    def rank(self) -> int:
        """The process's place."""
        return self._exchange.rank

    @property
    def processes(self) -> int:
        """How many there are."""
        return self._exchange.size

    def own_inputs(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The process's items (the first one if it has none), and how many there are in all.

        Args:
            inputs: keyword arguments, tensors (N, ...).
        """
        count = count_items(inputs, self._module)
        return take_items(inputs, shares(count, self._exchange.size)[self.rank]), count

    def own(self, side: Mapping[str, torch.Tensor]) -> range:
        """Which items the process has.

        Args:
            side: tensors beside the hidden state, with the number of items.
        """
        return self._all(side)[self.rank]

    def whole(self, own: torch.Tensor, side: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The items of all processes (N, ...), which call it together.

        Args:
            own: of this process's items, one at least.
            side: as of :meth:`own`.

        Raises:
            ModelError: it has not one row for each item.
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
