"""Messages between the ranks of a process group, started early and counted.

Legend: ``n`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.kernels.collectives.waiting import wait

Shape = tuple[tuple[int, ...], torch.dtype]


class Pending(NamedTuple):
    """Messages in flight. Sent tensors are kept alive until :meth:`wait`."""

    works: tuple[dist.Work, ...]
    sent: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for all messages and return the received tensors in the order of ``receives``."""
        for work in self.works:
            wait(work)
        return self.received


class Exchange:
    """Point-to-point messages within a group.

    Both ends must start the same messages in the same order. Both know the shapes, so only payload
    is sent, and empty tensors are skipped.

    Args:
        group: default: all ranks. With NCCL, all members of the group must already have taken part
            in one operation, because skipped messages may leave some of them out of the first
            exchange.

    Attributes:
        rank, size: this process's rank in the group, and n.
        sent_bytes: payload bytes sent since construction.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.use(group)
        self.sent_bytes = 0

    def use(self, group: dist.ProcessGroup | None) -> None:
        """Switch to another group of the same processes."""
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
    ) -> Pending:
        """Start messages to and from ranks of the group, and return at once.

        Args:
            sends: (destination rank, tensor).
            receives: (source rank, (shape, dtype)).
        """
        received = tuple(
            torch.empty(shape, dtype=dtype, device=device) for _, (shape, dtype) in receives
        )
        sent = tuple(tensor.contiguous() for _, tensor in sends)
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=receiver)
            for (receiver, _), tensor in zip(sends, sent, strict=True)
            if tensor.numel()
        ]
        self.sent_bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        operations += [
            dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=source)
            for (source, _), tensor in zip(receives, received, strict=True)
            if tensor.numel()
        ]
        works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
        return Pending(works, sent, received)


def carousel(
    exchange: Exchange,
    payload: Sequence[torch.Tensor],
    payload_shapes: Callable[[int], Sequence[Shape]],
    visit: Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    result_shapes: Callable[[int], Sequence[Shape]],
    merge: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor] | None]:
    """Pass every rank's payload around a ring; return each rank's results to it.

    Payload and results each make n - 1 hops: results start at the first rank visited, are merged on
    the way and end at the payload's owner. The next payload is received while the current one is
    processed.

    Args:
        payload_shapes: returns the shapes of a rank's payload.
        visit: ``visit(owner, payload) -> results``; called with this rank's payload first.
        result_shapes: returns the shapes of the results of a rank's payload; may be empty.
        merge: ``merge(earlier, later) -> results`` for the same payload.

    Returns:
        The results of this rank for its own payload, and the merged results of all other ranks
        (None if there are no other ranks, or no results).
    """
    me, n = exchange.rank, exchange.size
    successor, predecessor = (me + 1) % n, (me - 1) % n
    device = payload[0].device

    def pass_on(tensors: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Pending:
        sends = [(successor, tensor) for tensor in tensors]
        return exchange.start(sends, [(predecessor, shape) for shape in shapes], device)

    on_its_way = pass_on(payload, payload_shapes(predecessor)) if n > 1 else None
    local_results = visit(me, payload)
    results: Pending | None = None
    for hop in range(1, n):
        owner, following = (me - hop) % n, (me - hop - 1) % n
        assert on_its_way is not None
        current = on_its_way.wait()
        if hop < n - 1:
            on_its_way = pass_on(current, payload_shapes(following))
        gathered = visit(owner, current)
        if results is not None:
            gathered = merge(results.wait(), gathered)
        if len(gathered):
            results = pass_on(gathered, result_shapes(following))
    return local_results, None if results is None else results.wait()
