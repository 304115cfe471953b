"""Context-parallel attention calls: timed, bytes counted, and checked against one process.

Contains the functions that run in the processes of ``benchmarks.shared.ranks`` and the evaluation
of their results.

Legend: ``Hq`` query heads, ``Hk`` key heads, ``D`` head dim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.shared.ranks import EmulatedLink, Ranks
from raymm.kernels.attention import attention
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import context_attention
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout, needed_keys
from raymm.kernels.flash.reference import reference_attention
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import AttentionShape, method_bytes


@dataclass(frozen=True)
class Call:
    """Call of an attention layer.

    Attributes:
        queries, keys: distribution of rows and of keys over ranks.
        heads: Hq, Hk.
        link_gbit: Gbit/s of an emulated link that all ranks share; 0 for the real network.
    """

    mask: AttentionMask
    queries: ContextLayout
    keys: ContextLayout
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    link_gbit: float = 0.0

    @property
    def shape(self) -> AttentionShape:
        """Return the quantities that determine the bytes."""
        size = getattr(torch, self.dtype).itemsize
        return AttentionShape(
            self.queries.sizes, self.keys.sizes, *self.heads, self.head_dim, size, 4
        )

    def needed(self) -> list[list[int]]:
        """Return (n, n): number of keys of the second rank that rows of the first can see."""
        return [
            [
                sum(stop - start for start, stop in needed_keys((self.mask,), rows, keys))
                for keys in self.keys.ranges
            ]
            for rows in self.queries.ranges
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return query, key, value and output gradient of all tokens, each (1, H, T, D)."""
        generator = torch.Generator().manual_seed(0)
        (hq, hk), (rows, keys) = self.heads, self.mask.shape
        return [
            torch.randn(1, h, t, self.head_dim, generator=generator).to(getattr(torch, self.dtype))
            for h, t in ((hq, rows), (hk, keys), (hk, keys), (hq, rows))
        ]


class Timing(NamedTuple):
    """Seconds and payload bytes sent of one forward and backward on one rank."""

    start: float
    stop: float
    cpu_s: float
    forward: int
    backward: int


class Measured(NamedTuple):
    """One forward and backward on all ranks.

    ``seconds`` is from the first start to the last end; CPU seconds and bytes are per rank.
    """

    seconds: float
    cpu_s: tuple[float, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def measure(ranks: Ranks, call: Call, method: str) -> Measured:
    """Run the call once.

    Raises:
        RuntimeError: the sent bytes differ from the formulas.
    """
    found = ranks.run(run_on_rank, call=call, method=method)
    measured = Measured(
        max(one.stop for one in found) - min(one.start for one in found),
        tuple(one.cpu_s for one in found),
        tuple(one.forward for one in found),
        tuple(one.backward for one in found),
    )
    due = method_bytes(call.shape, method, call.needed() if method == "needed" else None)
    if (measured.forward, measured.backward) != (due.forward, due.backward):
        raise RuntimeError(f"{method} sent {measured[2:]}, the formulas say {due}")
    return measured


def write_expected(call: Call, rows: slice, path: Path) -> float:
    """Write dense float64 attention of some rows, for :func:`largest_error`.

    The output's gradient is zeroed outside ``rows``; then these rows alone determine every
    gradient: dQ of the other rows is zero, and dK and dV depend on nothing else.

    Returns:
        Largest relative error of O (in these rows), dQ, dK and dV of raymm's attention in this
        process, in the call's dtype.
    """
    query, key, value, grad = (t.double() for t in call.tensors())
    inputs = [t.requires_grad_() for t in (query[:, :, rows], key, value)]
    out, _ = reference_attention(*inputs, call.mask.dense(rows))
    out.backward(grad[:, :, rows])
    whole = torch.zeros_like(query)
    whole[:, :, rows] = inputs[0].grad
    expected = [out.detach(), whole, key.grad, value.grad]
    torch.save(expected, path)
    *inputs, grad = _only(rows, call.tensors())
    inputs = [t.requires_grad_() for t in inputs]
    out, _ = attention(*inputs, call.mask)
    out.backward(grad)
    found = out.detach()[:, :, rows], *(t.grad for t in inputs)
    return max(
        float((one.double() - due).norm() / due.norm())
        for one, due in zip(found, expected, strict=True)
    )


def largest_error(ranks: Ranks, call: Call, method: str, rows: slice, path: Path) -> float:
    """Return the largest relative error of O (in ``rows``), dQ, dK and dV over ranks, at full size.

    Args:
        rows, path: same as for :func:`write_expected`.
    """
    found = ranks.run(errors_on_rank, call=call, method=method, rows=rows, path=str(path))
    errors, norms = (torch.tensor(part).sum(dim=0) for part in zip(*found, strict=True))
    return float((errors / norms).max().sqrt())


def run_on_rank(group: dist.ProcessGroup, call: Call, method: str) -> Timing:
    """Run one timed forward and backward in a rank's process."""
    context, (query, key, value, grad) = _local(group, call, call.tensors())
    exchange = context.exchange
    dist.barrier(group)
    start, cpu = time.monotonic(), time.process_time()
    out = context_attention(
        query, key, value, ContextCall(context, [call.mask]), method=method
    )
    forward = exchange.sent_bytes
    out.backward(grad)
    stop = time.monotonic()
    return Timing(
        start, stop, time.process_time() - cpu, forward, exchange.sent_bytes - forward
    )


def errors_on_rank(
    group: dist.ProcessGroup, call: Call, method: str, rows: slice, path: str
) -> tuple[list[float], list[float]]:
    """Return squared errors and squared norms of O, dQ, dK and dV in a rank's process."""
    context, (query, key, value, grad) = _local(group, call, _only(rows, call.tensors()))
    out = context_attention(
        query, key, value, ContextCall(context, [call.mask]), method=method
    )
    out.backward(grad)
    mine, theirs = (
        layout.positions(group.rank()) for layout in (context.queries, context.keys)
    )
    inside = (mine >= rows.start) & (mine < rows.stop)
    expected = torch.load(path, weights_only=True)
    pairs = (
        (out.detach()[:, :, inside], expected[0][:, :, mine[inside] - rows.start]),
        (query.grad, expected[1][:, :, mine]),
        (key.grad, expected[2][:, :, theirs]),
        (value.grad, expected[3][:, :, theirs]),
    )
    return (
        [float((found.double() - due).square().sum()) for found, due in pairs],
        [float(due.square().sum()) for _, due in pairs],
    )


def bandwidth_on_rank(group: dist.ProcessGroup, megabytes: int) -> float:
    """Measure bytes per second from rank 0 to rank 1 at rank 1."""
    payload = torch.zeros(megabytes * 10**6, dtype=torch.uint8)
    dist.barrier(group)
    start = time.monotonic()
    if group.rank() == 0:
        dist.send(payload, group=group, group_dst=1)
    elif group.rank() == 1:
        dist.recv(payload, group=group, group_src=0)
    seconds = time.monotonic() - start
    dist.barrier(group)
    return payload.numel() / seconds


def _only(rows: slice, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a call with the output's gradient zeroed outside ``rows``."""
    grad = torch.zeros_like(tensors[3])
    grad[:, :, rows] = tensors[3][:, :, rows]
    return [*tensors[:3], grad]


def _local(
    group: dist.ProcessGroup, call: Call, tensors: list[torch.Tensor]
) -> tuple[ContextGroup, list[torch.Tensor]]:
    """Return this rank's context group and its shard of the tensors."""
    if call.link_gbit:
        exchange = EmulatedLink(group, call.link_gbit * 1e9 / 8 / group.size())
    else:
        exchange = Exchange(group)
    rows, keys = (
        layout.positions(group.rank()) for layout in (call.queries, call.keys)
    )
    local = [
        t[:, :, index].clone()
        for t, index in zip(tensors, (rows, keys, keys, rows), strict=True)
    ]
    return ContextGroup(exchange, call.queries, call.keys), [
        *(t.requires_grad_() for t in local[:3]), local[3],
    ]  # fmt: skip
