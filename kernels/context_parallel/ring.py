"""Attention over ranks by passing one side around a ring.

*Ring*: keys and values visit every rank, outputs stay (Ring Attention). *Rotate*: queries, partial
outputs and LSE visit every rank, keys and values stay (LV-XAttn, Alg. 1).

For the legend of shapes see ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymm.kernels.collectives.p2p import Shape, carousel
from raymm.kernels.context_parallel.call import ACCUMULATOR, ContextCall, Way, with_tokens
from raymm.kernels.context_parallel.partial import merge_partials, row_delta


def _ring_forward(call: ContextCall, query, key, value):
    """Send keys and values around the ring; outputs stay."""
    group = call.group
    merged: list[torch.Tensor] = []

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> tuple:
        k, v = payload[0].unbind(0)
        out, lse = call.forward(query, k, v, call.masks_of(group.rank, owner))
        merged[:] = (
            merge_partials(merged[0], merged[1], out, lse) if merged else (out.float(), lse)
        )
        return ()

    carousel(group.exchange, [torch.stack([key, value])], _ring_keys(key, call), visit,
             lambda rank: (), _add)  # fmt: skip
    out, lse = merged
    out = out.to(query.dtype)
    return out, (query, key, value, out, lse)


def _ring_backward(call: ContextCall, grad_out, saved):
    """Send keys and values around the ring again, with their gradients, which end at the owner."""
    query, key, value, out, lse = saved
    group = call.group
    delta = row_delta(grad_out, out)
    grad_query = torch.zeros(query.shape, dtype=ACCUMULATOR, device=query.device)

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        k, v = payload[0].unbind(0)
        masks = call.masks_of(group.rank, owner)
        dq, dk, dv = call.backward(grad_out, query, k, v, lse, delta, masks)
        grad_query.add_(dq)
        return [torch.stack([dk, dv])]

    def gradients(rank: int) -> list[Shape]:
        shape = with_tokens(key.shape, group.keys.sizes[rank])
        return [((2, *shape), ACCUMULATOR)]

    local, returned = carousel(
        group.exchange, [torch.stack([key, value])], _ring_keys(key, call), visit, gradients, _add
    )
    return grad_query, *_total(local, returned)[0].unbind(0)


def _ring_keys(key: torch.Tensor, call: ContextCall):
    """Return the shapes of a rank's stacked keys and values."""
    return lambda rank: [
        ((2, *with_tokens(key.shape, call.group.keys.sizes[rank])), key.dtype)
    ]


def _add(earlier: Sequence[torch.Tensor], later: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [first + second for first, second in zip(earlier, later, strict=True)]


def _total(own: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None) -> Sequence:
    return own if others is None else _add(own, others)


def _rotate_forward(call: ContextCall, query, key, value):
    """Send queries and their partial outputs around the ring (LV-XAttn, Alg. 1)."""
    group = call.group

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out, lse = call.forward(payload[0], key, value, call.masks_of(owner, group.rank))
        return [out.to(ACCUMULATOR), lse]

    def rows(rank: int) -> list[Shape]:
        return [(with_tokens(query.shape, group.queries.sizes[rank]), query.dtype)]

    def outputs(rank: int) -> list[Shape]:
        shape = with_tokens(query.shape, group.queries.sizes[rank])
        return [(shape, ACCUMULATOR), (shape[:3], torch.float32)]

    local, returned = carousel(
        group.exchange, [query], rows, visit, outputs,
        lambda earlier, later: merge_partials(*earlier, *later),
    )  # fmt: skip
    out, lse = local if returned is None else merge_partials(*local, *returned)
    out = out.to(query.dtype)
    return out, (query, key, value, out, lse)


def _rotate_backward(call: ContextCall, grad_out, saved):
    """Send queries around the ring with dO, LSE and rowsum(dO * O), which replaces O."""
    query, key, value, out, lse = saved
    group = call.group
    sums = [torch.zeros(t.shape, dtype=ACCUMULATOR, device=t.device) for t in (key, value)]

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (q, do), (row_lse, delta) = payload[0].unbind(0), payload[1].unbind(0)
        masks = call.masks_of(owner, group.rank)
        dq, dk, dv = call.backward(do, q, key, value, row_lse, delta, masks)
        sums[0].add_(dk)
        sums[1].add_(dv)
        return [dq]

    def rows(rank: int) -> list[Shape]:
        shape = (2, *with_tokens(query.shape, group.queries.sizes[rank]))
        return [(shape, query.dtype), (shape[:4], torch.float32)]

    def gradients(rank: int) -> list[Shape]:
        return [(with_tokens(query.shape, group.queries.sizes[rank]), ACCUMULATOR)]

    payload = [torch.stack([query, grad_out]), torch.stack([lse, row_delta(grad_out, out)])]
    local, returned = carousel(group.exchange, payload, rows, visit, gradients, _add)
    return _total(local, returned)[0], *sums


RING = Way(_ring_forward, _ring_backward)
ROTATE = Way(_rotate_forward, _rotate_backward)
