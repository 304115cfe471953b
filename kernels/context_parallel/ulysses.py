"""Attention over ranks with heads split instead of tokens during attention (DeepSpeed-Ulysses).

For the legend of shapes see ``attention.py``.
"""

from __future__ import annotations

import torch

from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextCall, Way, with_tokens
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.context_parallel.partial import row_delta
from raymm.kernels.host_copies import to_device


def _ulysses_forward(call: ContextCall, query, key, value):
    """Attend over all tokens with a part of the heads."""
    group = call.group
    q = _to_heads(query, group.queries, group.exchange)
    k, v = (_to_heads(t, group.keys, group.exchange) for t in (key, value))
    out, lse = call.forward(q, k, v, call.masks)
    return _to_tokens(out, group.queries, group.exchange), (q, k, v, out, lse)


def _ulysses_backward(call: ContextCall, grad_out, saved):
    q, k, v, out, lse = saved
    queries, keys, exchange = call.group.queries, call.group.keys, call.group.exchange
    do = _to_heads(grad_out, queries, exchange)
    dq, dk, dv = call.backward(do, q, k, v, lse, row_delta(do, out), call.masks)
    # Gradients are complete, not partial sums, so they are sent in their final dtype.
    return (
        _to_tokens(dq.to(q.dtype), queries, exchange),
        _to_tokens(dk.to(k.dtype), keys, exchange),
        _to_tokens(dv.to(v.dtype), keys, exchange),
    )


def _to_heads(local: torch.Tensor, layout: ContextLayout, exchange: Exchange) -> torch.Tensor:
    """Convert (B, H, tokens of this rank, D) to (B, H / n, T, D), in order of position."""
    me, chunks = exchange.rank, local.chunk(exchange.size, dim=1)
    peers = [rank for rank in range(exchange.size) if rank != me]
    shapes = [
        (rank, (with_tokens(chunks[me].shape, layout.sizes[rank]), local.dtype))
        for rank in peers
    ]
    pending = exchange.start([(rank, chunks[rank]) for rank in peers], shapes, local.device)
    full = local.new_empty(with_tokens(chunks[me].shape, layout.length))
    for rank, chunk in zip([me, *peers], (chunks[me], *pending.wait()), strict=True):
        full[:, :, to_device(layout.positions(rank), local.device)] = chunk
    return full


def _to_tokens(whole: torch.Tensor, layout: ContextLayout, exchange: Exchange) -> torch.Tensor:
    """Invert :func:`_to_heads`."""
    me = exchange.rank
    peers = [rank for rank in range(exchange.size) if rank != me]
    by_rank = {
        rank: whole[:, :, to_device(layout.positions(rank), whole.device)]
        for rank in range(exchange.size)
    }
    shape = (tuple(by_rank[me].shape), whole.dtype)
    pending = exchange.start(
        [(rank, by_rank[rank]) for rank in peers], [(rank, shape) for rank in peers], whole.device
    )
    heads = dict(zip(peers, pending.wait(), strict=True)) | {me: by_rank[me]}
    return torch.cat([heads[rank] for rank in range(exchange.size)], dim=1)


ULYSSES = Way(_ulysses_forward, _ulysses_backward, saves_inputs=False)
