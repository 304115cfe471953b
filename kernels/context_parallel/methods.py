"""Methods of attention over ranks.

*Gather* fetches the keys and values of all ranks, a few heads at a time, and fetches the next heads
during computation (Cornstarch v2 §4.3). *Needed* fetches only those that some row sees. *Ulysses*
splits heads instead of tokens during attention (DeepSpeed-Ulysses). *Ring*: keys and values visit
every rank, outputs stay (Ring Attention). *Rotate*: queries, partial outputs and LSE visit every
rank, keys and values stay (LV-XAttn, Alg. 1).

For the legend of shapes see ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from raymm.kernels.collectives.p2p import Exchange, Pending, Shape, carousel
from raymm.kernels.context_parallel.call import (
    ACCUMULATOR,
    ContextCall,
    Way,
    merge_partials,
    row_delta,
    with_tokens,
)
from raymm.kernels.context_parallel.layout import ContextLayout, indices, local_masks, needed_keys
from raymm.kernels.host_copies import to_device

_HEAD_CHUNKS = 4  # of keys and values: one is computed, the next is in flight


class _Needs:
    """Keys that this rank sends to and receives from every rank."""

    def __init__(self, call: ContextCall, only_needed: bool, device: torch.device) -> None:
        group = call.group
        me, keys = group.rank, group.keys

        def needs(rows_of: int, keys_of: int):
            if not only_needed:
                return keys.ranges[keys_of]
            return needed_keys(call.masks, group.queries.ranges[rows_of], keys.ranges[keys_of])

        ranks = range(group.exchange.size)
        self.others = [rank for rank in ranks if rank != me]
        self.give = {
            rank: to_device(keys.local(me, needs(rank, me)), device) for rank in self.others
        }
        self.own = to_device(keys.local(me, needs(me, me)), device)
        needed = {rank: needs(me, rank) for rank in ranks}
        positions = [indices(needed[rank]) for rank in (me, *self.others)]
        self.counts = [len(rank_keys) for rank_keys in positions]
        # Keys arrive rank by rank; the mask needs them in order of position.
        self.order = to_device(torch.cat(positions).argsort(), device)
        ranges = tuple(sorted(r for needed_ranges in needed.values() for r in needed_ranges))
        self.masks = local_masks(call.masks, group.queries.ranges[me], ranges)

    def fetch(self, both: torch.Tensor, exchange: Exchange) -> Pending:
        """Start to gather keys and values, (2, B, h, Tk, D)."""
        sends = [(rank, both[:, :, :, self.give[rank]]) for rank in self.others]
        receives = [
            (rank, ((*both.shape[:3], count, both.shape[4]), both.dtype))
            for rank, count in zip(self.others, self.counts[1:], strict=True)
        ]
        return exchange.start(sends, receives, both.device)

    def assemble(self, both: torch.Tensor, pending: Pending) -> tuple[torch.Tensor, ...]:
        """Return gathered keys and values, in order of position."""
        blocks = [both[:, :, :, self.own], *pending.wait()]
        return torch.cat(blocks, dim=3)[:, :, :, self.order].unbind(0)

    def give_back(
        self, gradients: torch.Tensor, exchange: Exchange
    ) -> tuple[torch.Tensor, Pending]:
        """Start to send gradients (2, B, h, keys, D) of gathered keys to the ranks of the keys.
        Return this rank's part and the pending parts from the others."""
        by_rank = torch.empty_like(gradients)
        by_rank[:, :, :, self.order] = gradients
        local, *remote = by_rank.split(self.counts, dim=3)
        sends = list(zip(self.others, remote, strict=True))
        receives = [
            (rank, ((*gradients.shape[:3], len(self.give[rank]), gradients.shape[4]),
                    gradients.dtype))
            for rank in self.others
        ]  # fmt: skip
        return local, exchange.start(sends, receives, gradients.device)


def _gather_forward(call: ContextCall, query, key, value, only_needed: bool = False):
    """Gather keys and values a few heads at a time, overlapping computation with the next heads."""
    needs = _Needs(call, only_needed, query.device)
    outs, lses = [], []
    for q, k, v in _by_heads([query], torch.stack([key, value]), needs, call.group.exchange):
        out, lse = call.forward(q, k, v, needs.masks)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, dim=1)
    return out, (query, key, value, out, torch.cat(lses, dim=1))


def _gather_backward(call: ContextCall, grad_out, saved, only_needed: bool = False):
    """Gather keys and values again, and send their gradients to their ranks."""
    query, key, value, out, lse = saved
    exchange, needs = call.group.exchange, _Needs(call, only_needed, query.device)
    key_value = torch.stack([key, value])
    grads = torch.zeros(key_value.shape, dtype=ACCUMULATOR, device=key_value.device)
    grad_query, returning, head = [], [], 0
    rows = [grad_out, query, lse, row_delta(grad_out, out)]
    for do, q, row_lse, delta, k, v in _by_heads(rows, key_value, needs, exchange):
        dq, dk, dv = call.backward(do, q, k, v, row_lse, delta, needs.masks)
        grad_query.append(dq)
        local, pending = needs.give_back(torch.stack([dk, dv]), exchange)
        heads = slice(head, head + k.shape[1])
        grads[:, :, heads].index_add_(3, needs.own, local)
        returning.append((heads, pending))
        head = heads.stop
    for heads, pending in returning:
        for rank, received in zip(needs.others, pending.wait(), strict=True):
            grads[:, :, heads].index_add_(3, needs.give[rank], received)
    return torch.cat(grad_query, dim=1), *grads.unbind(0)


def _by_heads(
    rows: list[torch.Tensor], both: torch.Tensor, needs: _Needs, exchange: Exchange
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (rows' heads ..., key, value) for a few key heads at a time."""
    key_heads = both.shape[2]
    groups = rows[0].shape[1] // key_heads
    chunks = both.tensor_split(min(_HEAD_CHUNKS, key_heads), dim=2)
    following, head = needs.fetch(chunks[0], exchange), 0
    for number, chunk in enumerate(chunks):
        on_its_way = following
        if number + 1 < len(chunks):
            following = needs.fetch(chunks[number + 1], exchange)
        key, value = needs.assemble(chunk, on_its_way)
        heads = slice(head * groups, (head + chunk.shape[2]) * groups)
        yield *(t[:, heads] for t in rows), key, value
        head += chunk.shape[2]


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


WAYS: dict[str, Way] = {
    "gather": Way(_gather_forward, _gather_backward),
    "needed": Way(
        partial(_gather_forward, only_needed=True), partial(_gather_backward, only_needed=True)
    ),
    "ring": Way(_ring_forward, _ring_backward),
    "ulysses": Way(_ulysses_forward, _ulysses_backward, saves_inputs=False),
    "rotate": Way(_rotate_forward, _rotate_backward),
}
METHODS = tuple(WAYS)
"""Accepted values of ``method`` in :mod:`raymm.kernels.context_parallel.attention`."""
