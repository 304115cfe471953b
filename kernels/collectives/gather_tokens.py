"""Where tokens that processes share become whole again: every process gets all of them.

What follows is computed by all processes alike, while gradients of parameters are *summed* over
processes. So one process, the first of the group, contributes the gradient of all that follows:
:func:`contribute_once` makes the others' zero, and the backward of :func:`gather_tokens` hands
every process its tokens' part of the first one's gradient. Sums over processes are then exact:
nothing is divided, and nothing but zeros is added.

Legend: ``B`` items, ``T`` tokens, ``t`` tokens of this process, ``C`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.p2p import Exchange

CONTRIBUTOR = 0
"""The process whose gradient counts for what all processes compute alike."""


def gather_tokens(local: torch.Tensor, sizes: Sequence[int], exchange: Exchange) -> torch.Tensor:
    """The tokens of all processes, in their order.

    All processes must call it together, forward and backward. Its gradient is read on process
    :data:`CONTRIBUTOR` only.

    Args:
        local: (B, t, C), this process's tokens.
        sizes: t of every process.
        exchange: the processes among which messages go.

    Returns:
        (B, T, C).

    Raises:
        ValueError: as many tokens as the sizes do not say.
    """
    return _Gather.apply(local, tuple(sizes), exchange)


def gather_for_each(
    local: torch.Tensor, sizes: Sequence[int], exchange: Exchange
) -> torch.Tensor:
    """As :func:`gather_tokens`, where each process goes on with something else of what it gets:
    gradients are summed over processes, in their order.

    Args:
        local: (B, t, ...), this process's tokens.
        sizes: t of every process.
        exchange: the processes among which messages go.

    Returns:
        (B, T, ...).

    Raises:
        ValueError: as many tokens as the sizes do not say.
    """
    return _GatherForEach.apply(local, tuple(sizes), exchange)


def contribute_once(output: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """``output`` itself; its gradient is zero on all processes but :data:`CONTRIBUTOR`."""
    return _ContributeOnce.apply(output, exchange.rank == CONTRIBUTOR)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange):
        ctx.sizes, ctx.exchange = sizes, exchange
        return _gathered(local, sizes, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        exchange, sizes = ctx.exchange, ctx.sizes
        if exchange.rank == CONTRIBUTOR:
            parts = grad.split(sizes, dim=1)
            sends = [(rank, part) for rank, part in enumerate(parts) if rank != exchange.rank]
            exchange.start(sends, [], grad.device).wait()
            return parts[exchange.rank].contiguous(), None, None
        shape = (grad.shape[0], sizes[exchange.rank], *grad.shape[2:])
        receives = [(CONTRIBUTOR, (shape, grad.dtype))]
        (own,) = exchange.start([], receives, grad.device).wait()
        return own, None, None


def _gathered(
    local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange
) -> torch.Tensor:
    if local.shape[1] != sizes[exchange.rank]:
        raise ValueError(
            f"process {exchange.rank} has {local.shape[1]} tokens, expected "
            f"{sizes[exchange.rank]} from its layout"
        )
    return torch.cat(_of_all([local] * exchange.size, sizes, exchange), dim=1)


def _of_all(
    sent: Sequence[torch.Tensor], sizes: Sequence[int], exchange: Exchange
) -> list[torch.Tensor]:
    """What every process sends this one, in their order.

    Args:
        sent: to every process; what it sends itself is its own.
        sizes: tokens of what comes of every process.
        exchange: the processes.
    """
    own = sent[exchange.rank]
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    shapes = [(rank, ((own.shape[0], sizes[rank], *own.shape[2:]), own.dtype)) for rank in others]
    pending = exchange.start([(rank, sent[rank]) for rank in others], shapes, own.device)
    parts = dict(zip(others, pending.wait(), strict=True)) | {exchange.rank: own}
    return [parts[rank] for rank in range(exchange.size)]


class _GatherForEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], exchange: Exchange):
        ctx.sizes, ctx.exchange = sizes, exchange
        return _gathered(local, sizes, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        exchange, sizes = ctx.exchange, ctx.sizes
        parts = [part.contiguous() for part in grad.split(sizes, dim=1)]
        first, *others = _of_all(parts, [sizes[exchange.rank]] * exchange.size, exchange)
        total = first.clone()
        for part in others:
            total += part
        return total, None, None


class _ContributeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, contributes: bool):
        ctx.contributes = contributes
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        # Zeros, not a product with zero: a gradient that overflowed stays out too.
        return grad if ctx.contributes else torch.zeros_like(grad), None
