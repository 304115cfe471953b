"""Where items that processes share become whole again: every process gets all of them.

Legend: ``N`` items, ``n`` items of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.p2p import Exchange


def gather_items(local: torch.Tensor, sizes: Sequence[int], exchange: Exchange) -> torch.Tensor:
    """The items of all processes, in their order.

    All processes must call it together. All must be handed the same gradient of what it returns,
    of which each takes its items' part: backward needs no message, and gradients of parameters
    have the right *sum* over the processes.

    Args:
        local: (n, ...), this process's items.
        sizes: n of every process.
        exchange: the processes among which messages go.

    Returns:
        (N, ...).

    Raises:
        ValueError: as many items as the sizes do not say.
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
        others = [rank for rank in range(exchange.size) if rank != exchange.rank]
        shapes = [(rank, ((sizes[rank], *local.shape[1:]), local.dtype)) for rank in others]
        pending = exchange.start([(rank, local) for rank in others], shapes, local.device)
        parts = dict(zip(others, pending.wait(), strict=True)) | {exchange.rank: local}
        return torch.cat([parts[rank] for rank in range(exchange.size)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        start, stop = ctx.own
        return grad[start:stop].contiguous(), None, None
