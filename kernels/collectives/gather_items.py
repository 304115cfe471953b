"""All-gather of items that are split over processes.

Legend: ``N`` items, ``n`` items of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.p2p import Exchange


def gather_items(local: torch.Tensor, sizes: Sequence[int], exchange: Exchange) -> torch.Tensor:
    """Return the items of all processes, in their order. All processes must call it together.

    The gradient of the result must be identical on all processes. Backward takes the part of the
    local items from it and needs no communication, so the *sum* of parameter gradients over the
    processes is correct.

    Args:
        local: (n, ...), this process's items.
        sizes: n of every process.

    Returns:
        (N, ...).

    Raises:
        ValueError: the number of local items differs from ``sizes``.
    """
    if local.shape[0] != sizes[exchange.rank]:
        raise ValueError(
            f"process {exchange.rank} has {local.shape[0]} items, expected {sizes[exchange.rank]}"
        )
    return _Gather.apply(local, tuple(sizes), exchange)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange):
        start = sum(sizes[: exchange.rank])
        ctx.own = start, start + sizes[exchange.rank]
        peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
        shapes = [(rank, ((sizes[rank], *local.shape[1:]), local.dtype)) for rank in peers]
        pending = exchange.start([(rank, local) for rank in peers], shapes, local.device)
        by_rank = dict(zip(peers, pending.wait(), strict=True)) | {exchange.rank: local}
        return torch.cat([by_rank[rank] for rank in range(exchange.size)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        start, stop = ctx.own
        return grad[start:stop].contiguous(), None, None
