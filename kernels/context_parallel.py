"""Attention of tokens that are dealt out over the ranks of a group, with any mask.

Four ways, of the same result (Cornstarch v2 §4.3; LV-XAttn §3):

- ``gather``: every rank gets the keys and values of all others, a few heads at a time, the
  next heads on their way while these are computed; ``needed``: of those only what its rows
  can see.
- ``ring``: keys and values visit every rank; outputs stay.
- ``ulysses``: heads instead of tokens are dealt out for the time of the attention.
- ``rotate``: queries, partial outputs and LSE visit every rank; keys and values stay. For
  cross attention with many more keys than queries.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` and ``Tk`` tokens of this
rank, ``D`` head dim, ``n`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.context_layout import ContextLayout, indices, local_masks, needed_keys
from raymm.kernels.exchange import Exchange, Pending, Shape, carousel
from raymm.kernels.mask import AttentionMask, MaskError, as_masks
from raymm.kernels.partial_attention import (
    merge_partials,
    partial_backward,
    partial_forward,
    row_delta,
)

_HEAD_CHUNKS = 4  # of keys and values that are gathered: one computed, one on its way
_ACCUMULATOR = torch.float32


@dataclass(frozen=True)
class ContextGroup:
    """The ranks over which a sequence is dealt out, and which tokens they have.

    Attributes:
        exchange: this rank's end of the group.
        queries: which rows each rank has.
        keys: which keys; the same as ``queries`` in self-attention.
    """

    exchange: Exchange
    queries: ContextLayout
    keys: ContextLayout

    def __post_init__(self) -> None:
        for name, layout in (("queries", self.queries), ("keys", self.keys)):
            if layout.num_ranks != self.exchange.size:
                raise MaskError(
                    f"{name} are dealt out over {layout.num_ranks} ranks, the group has "
                    f"{self.exchange.size}"
                )

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.exchange.rank


@dataclass(frozen=True)
class _Call:
    """What an attention call is besides its tensors."""

    group: ContextGroup
    masks: tuple[AttentionMask, ...]
    scale: float
    softcap: float | None

    def masks_of(self, query_rank: int, key_rank: int) -> tuple[AttentionMask, ...]:
        """Of one rank's rows and one rank's keys."""
        rows = self.group.queries.ranges[query_rank]
        return local_masks(self.masks, rows, self.group.keys.ranges[key_rank])

    def forward(self, query, key, value, masks):
        return partial_forward(query, key, value, masks, self.scale, self.softcap)

    def backward(self, grad_out, query, key, value, lse, delta, masks):
        """dQ, dK, dV in fp32."""
        return partial_backward(
            grad_out, query, key, value, lse, delta, masks, self.scale, self.softcap
        )


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask | Sequence[AttentionMask],
    group: ContextGroup,
    *,
    method: str = "gather",
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's rows to the keys of all ranks.

    Args:
        query: (B, Hq, Tq, D), this rank's rows in ascending order of position.
        key, value: (B, Hk, Tk, D), this rank's keys.
        mask: of the whole sequence; one for all sequences, or one each.
        group: who has what.
        method: one of :data:`METHODS`.

    Returns:
        (B, Hq, Tq, D) in the dtype of the query.

    Raises:
        MaskError: a mask that does not fit the layouts.
        ValueError: an unknown method, tensors that do not fit the layout, or Ulysses with a
            number of heads that the ranks do not divide.
    """
    masks = as_masks(mask, query.shape[0], group.queries.length, group.keys.length)
    expected = group.queries.sizes[group.rank], group.keys.sizes[group.rank]
    if (query.shape[2], key.shape[2]) != expected:
        raise ValueError(
            f"rank {group.rank} has {query.shape[2]} rows and {key.shape[2]} keys, its layout "
            f"says {expected[0]} and {expected[1]}"
        )
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    size = group.exchange.size
    if method == "ulysses" and (query.shape[1] % size or key.shape[1] % size):
        raise ValueError(
            f"ulysses deals out heads: {query.shape[1]} query and {key.shape[1]} key heads must "
            f"be multiples of {size} ranks"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = _Call(group, masks, scale, softcap)
    return _ContextAttention.apply(query, key, value, call, _WAYS[method])


def _with_tokens(shape: Sequence[int], tokens: int) -> tuple[int, ...]:
    return (*shape[:2], tokens, *shape[3:])


class _Way(NamedTuple):
    """One method: ``forward(call, q, k, v) -> out, saved`` and ``backward(call, dO, saved) ->
    dQ, dK, dV`` in fp32."""

    forward: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, call: _Call, way: _Way):
        out, saved = way.forward(call, query, key, value)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.way, ctx.dtype = call, way, query.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        gradients = ctx.way.backward(ctx.call, grad_out, ctx.saved_tensors)
        return *(gradient.to(ctx.dtype) for gradient in gradients), None, None


def _ring_forward(call: _Call, query, key, value):
    """Keys and values travel; outputs stay."""
    group = call.group
    merged: list[torch.Tensor] = []

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> tuple:
        k, v = payload[0].unbind(0)
        out, lse = call.forward(query, k, v, call.masks_of(group.rank, owner))
        merged[:] = merge_partials(*merged, out, lse) if merged else (out.float(), lse)
        return ()

    carousel(group.exchange, [torch.stack([key, value])], _ring_keys(key, call), visit,
             lambda rank: (), _add)  # fmt: skip
    out, lse = merged
    out = out.to(query.dtype)
    return out, (query, key, value, out, lse)


def _ring_backward(call: _Call, grad_out, saved):
    """Keys and values travel again, and their gradients with them, home."""
    query, key, value, out, lse = saved
    group = call.group
    delta = row_delta(grad_out, out)
    grad_query = torch.zeros(query.shape, dtype=_ACCUMULATOR, device=query.device)

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        k, v = payload[0].unbind(0)
        masks = call.masks_of(group.rank, owner)
        dq, dk, dv = call.backward(grad_out, query, k, v, lse, delta, masks)
        grad_query.add_(dq)
        return [torch.stack([dk, dv])]

    def gradients(rank: int) -> list[Shape]:
        shape = _with_tokens(key.shape, group.keys.sizes[rank])
        return [((2, *shape), _ACCUMULATOR)]

    own, others = carousel(
        group.exchange, [torch.stack([key, value])], _ring_keys(key, call), visit, gradients, _add
    )
    return grad_query, *_total(own, others)[0].unbind(0)


def _ring_keys(key: torch.Tensor, call: _Call):
    """Shapes of a rank's keys and values, stacked."""
    return lambda rank: [
        ((2, *_with_tokens(key.shape, call.group.keys.sizes[rank])), key.dtype)
    ]


def _add(earlier: Sequence[torch.Tensor], later: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one + other for one, other in zip(earlier, later, strict=True)]


def _total(own: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None) -> Sequence:
    return own if others is None else _add(own, others)


def _rotate_forward(call: _Call, query, key, value):
    """Queries travel with their partial outputs; keys and values stay (LV-XAttn, Alg. 1)."""
    group = call.group

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out, lse = call.forward(payload[0], key, value, call.masks_of(owner, group.rank))
        return [out.to(_ACCUMULATOR), lse]

    def rows(rank: int) -> list[Shape]:
        return [(_with_tokens(query.shape, group.queries.sizes[rank]), query.dtype)]

    def outputs(rank: int) -> list[Shape]:
        shape = _with_tokens(query.shape, group.queries.sizes[rank])
        return [(shape, _ACCUMULATOR), (shape[:3], torch.float32)]

    own, others = carousel(
        group.exchange, [query], rows, visit, outputs,
        lambda earlier, later: merge_partials(*earlier, *later),
    )  # fmt: skip
    out, lse = own if others is None else merge_partials(*own, *others)
    out = out.to(query.dtype)
    return out, (query, key, value, out, lse)


def _rotate_backward(call: _Call, grad_out, saved):
    """Queries travel with dO, LSE and rowsum(dO * O), which takes the place of O."""
    query, key, value, out, lse = saved
    group = call.group
    sums = [torch.zeros(t.shape, dtype=_ACCUMULATOR, device=t.device) for t in (key, value)]

    def visit(owner: int, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (q, do), (row_lse, delta) = payload[0].unbind(0), payload[1].unbind(0)
        masks = call.masks_of(owner, group.rank)
        dq, dk, dv = call.backward(do, q, key, value, row_lse, delta, masks)
        sums[0].add_(dk)
        sums[1].add_(dv)
        return [dq]

    def rows(rank: int) -> list[Shape]:
        shape = (2, *_with_tokens(query.shape, group.queries.sizes[rank]))
        return [(shape, query.dtype), (shape[:4], torch.float32)]

    def gradients(rank: int) -> list[Shape]:
        return [(_with_tokens(query.shape, group.queries.sizes[rank]), _ACCUMULATOR)]

    payload = [torch.stack([query, grad_out]), torch.stack([lse, row_delta(grad_out, out)])]
    own, others = carousel(group.exchange, payload, rows, visit, gradients, _add)
    return _total(own, others)[0], *sums


def _ulysses_forward(call: _Call, query, key, value):
    """All tokens of a part of the heads, for the time of the attention."""
    group = call.group
    q = _to_heads(query, group.queries, group.exchange)
    k, v = (_to_heads(t, group.keys, group.exchange) for t in (key, value))
    out, lse = call.forward(q, k, v, call.masks)
    return _to_tokens(out, group.queries, group.exchange), (q, k, v, out, lse)


def _ulysses_backward(call: _Call, grad_out, saved):
    q, k, v, out, lse = saved
    queries, keys, exchange = call.group.queries, call.group.keys, call.group.exchange
    do = _to_heads(grad_out, queries, exchange)
    dq, dk, dv = call.backward(do, q, k, v, lse, row_delta(do, out), call.masks)
    # Each is whole, not a share: it travels in the dtype it ends in.
    return (
        _to_tokens(dq.to(q.dtype), queries, exchange),
        _to_tokens(dk.to(k.dtype), keys, exchange),
        _to_tokens(dv.to(v.dtype), keys, exchange),
    )


def _to_heads(local: torch.Tensor, layout: ContextLayout, exchange: Exchange) -> torch.Tensor:
    """(B, H, tokens of this rank, D) -> (B, H / n, T, D), in order of position."""
    me, parts = exchange.rank, local.chunk(exchange.size, dim=1)
    others = [rank for rank in range(exchange.size) if rank != me]
    shapes = [
        (rank, (_with_tokens(parts[me].shape, layout.sizes[rank]), local.dtype))
        for rank in others
    ]
    pending = exchange.start([(rank, parts[rank]) for rank in others], shapes, local.device)
    whole = local.new_empty(_with_tokens(parts[me].shape, layout.length))
    for rank, part in zip([me, *others], (parts[me], *pending.wait()), strict=True):
        whole[:, :, layout.positions(rank).to(local.device)] = part
    return whole


def _to_tokens(whole: torch.Tensor, layout: ContextLayout, exchange: Exchange) -> torch.Tensor:
    """The inverse of :func:`_to_heads`."""
    me = exchange.rank
    others = [rank for rank in range(exchange.size) if rank != me]
    parts = {
        rank: whole[:, :, layout.positions(rank).to(whole.device)]
        for rank in range(exchange.size)
    }
    shape = (tuple(parts[me].shape), whole.dtype)
    pending = exchange.start(
        [(rank, parts[rank]) for rank in others], [(rank, shape) for rank in others], whole.device
    )
    heads = dict(zip(others, pending.wait(), strict=True)) | {me: parts[me]}
    return torch.cat([heads[rank] for rank in range(exchange.size)], dim=1)


class _Needs:
    """Which keys this rank gives to and takes from every rank."""

    def __init__(self, call: _Call, only_needed: bool, device: torch.device) -> None:
        group = call.group
        me, keys = group.rank, group.keys

        def wanted(rows_of: int, keys_of: int):
            if not only_needed:
                return keys.ranges[keys_of]
            return needed_keys(call.masks, group.queries.ranges[rows_of], keys.ranges[keys_of])

        ranks = range(group.exchange.size)
        self.others = [rank for rank in ranks if rank != me]
        self.give = {
            rank: keys.local(me, wanted(rank, me)).to(device) for rank in self.others
        }
        self.own = keys.local(me, wanted(me, me)).to(device)
        taken = {rank: wanted(me, rank) for rank in ranks}
        positions = [indices(taken[rank]) for rank in (me, *self.others)]
        self.counts = [len(part) for part in positions]
        # Keys come rank by rank; the mask wants them in order of position.
        self.order = torch.cat(positions).argsort().to(device)
        ranges = tuple(sorted(r for one in taken.values() for r in one))
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
        """Keys and values that were gathered, in order of position."""
        parts = [both[:, :, :, self.own], *pending.wait()]
        return torch.cat(parts, dim=3)[:, :, :, self.order].unbind(0)

    def give_back(
        self, gradients: torch.Tensor, exchange: Exchange
    ) -> tuple[torch.Tensor, Pending]:
        """Start to send gradients (2, B, h, keys, D) of gathered keys to where the keys are.

        Returns:
            This rank's own share, and the others' on their way.
        """
        by_rank = torch.empty_like(gradients)
        by_rank[:, :, :, self.order] = gradients
        own, *theirs = by_rank.split(self.counts, dim=3)
        sends = list(zip(self.others, theirs, strict=True))
        receives = [
            (rank, ((*gradients.shape[:3], len(self.give[rank]), gradients.shape[4]),
                    gradients.dtype))
            for rank in self.others
        ]  # fmt: skip
        return own, exchange.start(sends, receives, gradients.device)


def _gather_forward(call: _Call, query, key, value, only_needed: bool = False):
    """Keys and values of all ranks, a few heads at a time; the next heads travel meanwhile."""
    needs = _Needs(call, only_needed, query.device)
    outs, lses = [], []
    for q, k, v in _by_heads([query], torch.stack([key, value]), needs, call.group.exchange):
        out, lse = call.forward(q, k, v, needs.masks)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, dim=1)
    return out, (query, key, value, out, torch.cat(lses, dim=1))


def _gather_backward(call: _Call, grad_out, saved, only_needed: bool = False):
    """Keys and values are gathered again; their gradients return to their ranks."""
    query, key, value, out, lse = saved
    exchange, needs = call.group.exchange, _Needs(call, only_needed, query.device)
    both = torch.stack([key, value])
    grads = torch.zeros(both.shape, dtype=_ACCUMULATOR, device=both.device)
    grad_query, returning, head = [], [], 0
    rows = [grad_out, query, lse, row_delta(grad_out, out)]
    for do, q, row_lse, delta, k, v in _by_heads(rows, both, needs, exchange):
        dq, dk, dv = call.backward(do, q, k, v, row_lse, delta, needs.masks)
        grad_query.append(dq)
        own, pending = needs.give_back(torch.stack([dk, dv]), exchange)
        heads = slice(head, head + k.shape[1])
        grads[:, :, heads].index_add_(3, needs.own, own)
        returning.append((heads, pending))
        head = heads.stop
    for heads, pending in returning:
        for rank, part in zip(needs.others, pending.wait(), strict=True):
            grads[:, :, heads].index_add_(3, needs.give[rank], part)
    return torch.cat(grad_query, dim=1), *grads.unbind(0)


def _by_heads(rows: list[torch.Tensor], both: torch.Tensor, needs: _Needs, exchange: Exchange):
    """(rows' heads ..., key, value) of a few key heads at a time."""
    key_heads = both.shape[2]
    groups = rows[0].shape[1] // key_heads
    chunks = both.tensor_split(min(_HEAD_CHUNKS, key_heads), dim=2)
    on_its_way, head = needs.fetch(chunks[0], exchange), 0
    for number, chunk in enumerate(chunks):
        following = None
        if number + 1 < len(chunks):
            following = needs.fetch(chunks[number + 1], exchange)
        key, value = needs.assemble(chunk, on_its_way)
        heads = slice(head * groups, (head + chunk.shape[2]) * groups)
        yield *(t[:, heads] for t in rows), key, value
        on_its_way, head = following, head + chunk.shape[2]


_WAYS = {
    "gather": _Way(_gather_forward, _gather_backward),
    "needed": _Way(
        partial(_gather_forward, only_needed=True), partial(_gather_backward, only_needed=True)
    ),
    "ring": _Way(_ring_forward, _ring_backward),
    "ulysses": _Way(_ulysses_forward, _ulysses_backward),
    "rotate": _Way(_rotate_forward, _rotate_backward),
}
METHODS = tuple(_WAYS)
"""What ``method`` may be."""
