"""Attention over ranks by gathering the keys and values that the rows of a rank see.

*Gather* fetches the keys and values of all ranks, a few heads at a time, and fetches the next heads
during computation (Cornstarch v2 §4.3). *Needed* fetches only those that some row sees.

For the legend of shapes see ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from raymm.kernels.collectives.p2p import Exchange, Pending
from raymm.kernels.context_parallel.call import ACCUMULATOR, ContextCall, Way
from raymm.kernels.context_parallel.layout import indices, local_masks, needed_keys
from raymm.kernels.context_parallel.partial import row_delta
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


GATHER = Way(_gather_forward, _gather_backward)
NEEDED = Way(
    partial(_gather_forward, only_needed=True), partial(_gather_backward, only_needed=True)
)
