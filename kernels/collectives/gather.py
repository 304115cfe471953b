"""All-gather of tokens, or of items, that are split over processes.

All processes compute the layers after the gather identically, while parameter gradients are
*summed* over processes. To count those layers once, only the first process of the group contributes
their gradient: :func:`contribute_once` zeroes it on the others, and the backward of
:func:`gather_tokens` sends each process its tokens' part of the first process's gradient. Sums over
processes are then exact: nothing is divided, and only zeros are added.

Legend: ``B`` items, ``T`` tokens, ``t`` tokens of this process, ``C`` width; where items are split,
``N`` items and ``n`` items of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.p2p import Exchange

CONTRIBUTOR = 0
"""Rank of the process whose gradient counts for layers that all processes compute identically."""


def gather_tokens(local: torch.Tensor, sizes: Sequence[int], exchange: Exchange) -> torch.Tensor:
    """Return the tokens of all processes, in their order.

    All processes must call it together, forward and backward. Backward uses the gradient of process
    :data:`CONTRIBUTOR` only.

    Args:
        local: (B, t, C), this process's tokens.
        sizes: t of every process.

    Returns:
        (B, T, C).

    Raises:
        ValueError: the number of local tokens differs from ``sizes``.
    """
    return _Gather.apply(local, tuple(sizes), exchange)


def gather_for_each(
    local: torch.Tensor, sizes: Sequence[int], exchange: Exchange
) -> torch.Tensor:
    """Gather (B, t, ...) like :func:`gather_tokens`, for processes that use the result
    differently. Backward sums the gradients over processes, in their order.

    Raises:
        ValueError: the number of local tokens differs from ``sizes``.
    """
    return _GatherForEach.apply(local, tuple(sizes), exchange)


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
    return _GatherItems.apply(local, tuple(sizes), exchange)


def contribute_once(output: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return ``output``, and zero its gradient on all processes except :data:`CONTRIBUTOR`."""
    return _ContributeOnce.apply(output, exchange.rank == CONTRIBUTOR)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange):
        ctx.sizes, ctx.exchange = sizes, exchange
        if local.shape[1] != sizes[exchange.rank]:
            raise ValueError(
                f"process {exchange.rank} has {local.shape[1]} tokens, expected "
                f"{sizes[exchange.rank]} from its layout"
            )
        return torch.cat(_of_all([local] * exchange.size, sizes, exchange), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        exchange, sizes = ctx.exchange, ctx.sizes
        if exchange.rank == CONTRIBUTOR:
            gradients = grad.split(sizes, dim=1)
            sends = [
                (rank, gradient) for rank, gradient in enumerate(gradients)
                if rank != exchange.rank
            ]
            exchange.start(sends, [], grad.device).wait()
            return gradients[exchange.rank].contiguous(), None, None
        shape = (grad.shape[0], sizes[exchange.rank], *grad.shape[2:])
        receives = [(CONTRIBUTOR, (shape, grad.dtype))]
        (local,) = exchange.start([], receives, grad.device).wait()
        return local, None, None


def _of_all(
    sent: Sequence[torch.Tensor], sizes: Sequence[int], exchange: Exchange, dim: int = 1
) -> list[torch.Tensor]:
    """Send ``sent[rank]`` to every rank, and return the tensors received, in order of rank.

    Args:
        sent: one tensor per process; this process keeps its own.
        sizes: length of each process's tensor along ``dim``.
    """
    local = sent[exchange.rank]
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    shapes = [
        (rank, ((*local.shape[:dim], sizes[rank], *local.shape[dim + 1 :]), local.dtype))
        for rank in peers
    ]
    pending = exchange.start([(rank, sent[rank]) for rank in peers], shapes, local.device)
    by_rank = dict(zip(peers, pending.wait(), strict=True)) | {exchange.rank: local}
    return [by_rank[rank] for rank in range(exchange.size)]


class _GatherForEach(_Gather):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        exchange, sizes = ctx.exchange, ctx.sizes
        shards = [shard.contiguous() for shard in grad.split(sizes, dim=1)]
        first, *later = _of_all(shards, [sizes[exchange.rank]] * exchange.size, exchange)
        total = first.clone()
        for shard in later:
            total += shard
        return total, None, None


class _GatherItems(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange):
        start = sum(sizes[: exchange.rank])
        ctx.own = start, start + sizes[exchange.rank]
        return torch.cat(_of_all([local] * exchange.size, sizes, exchange, dim=0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        start, stop = ctx.own
        return grad[start:stop].contiguous(), None, None


class _ContributeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, contributes: bool):
        ctx.contributes = contributes
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        # New zeros, not a product with zero, so that inf and NaN do not pass.
        return grad if ctx.contributes else torch.zeros_like(grad), None
