"""Grid of processes of each rank of a plan.

Processes with different ``fsdp`` positions split the samples of every microbatch, those with
different ``cp`` positions the tokens of every sample, and those with different ``tp`` positions the
parameters of every layer. All processes of a rank run its instructions in the same order, so
schedules, checks and simulations work on ranks, and communication within a rank cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.resharding import Resharding
from raymm.scheduler.plan.stage import Edge


class Process(NamedTuple):
    """One process: its rank and its position in the grid of the rank."""

    rank: int
    fsdp: int
    cp: int
    tp: int


class P2PGroup(NamedTuple):
    """Processes at both ends of an edge: all ``senders`` hold a tensor that all ``receivers``
    need."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    direction: Direction

    @property
    def resharding(self) -> Resharding:
        return Resharding(len(self.senders), len(self.receivers))


def connected_pairs(p2p_groups: Iterable[tuple[Edge, Iterable[P2PGroup]]]) -> dict[
    tuple[int, int], None
]:
    """Return the ordered (sender, receiver) pairs of processes with messages on any edge, in the
    order of the edges."""
    return {
        (p2p_group.senders[sender], p2p_group.receivers[receiver]): None
        for _, edge_groups in p2p_groups
        for p2p_group in edge_groups
        for sender, receiver in p2p_group.resharding.links()
    }


class Processes:
    """Processes of a plan, numbered rank by rank, with tensor-parallel neighbours adjacent. ``all``
    has every process, in the order of the numbers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.all = tuple(
            Process(rank, fsdp, cp, tp)
            for rank in range(plan.num_ranks)
            for fsdp in range(plan.degrees(rank).fsdp)
            for cp in range(plan.degrees(rank).cp)
            for tp in range(plan.degrees(rank).tp)
        )
        counts = [plan.processes(rank) for rank in range(plan.num_ranks)]
        self._first = list(accumulate(counts, initial=0))

    def of_rank(self, rank: int) -> range:
        return range(self._first[rank], self._first[rank + 1])

    def data_place(self, process: Process) -> int:
        """Return the position of a process in its :meth:`data_group`."""
        return process.fsdp * self.plan.degrees(process.rank).cp + process.cp

    def data_group(self, process: Process) -> tuple[int, ...]:
        """Return the processes with the same parameters; they split samples and tokens."""
        return self._alike(process, tp=process.tp)

    def sample_group(self, process: Process) -> tuple[int, ...]:
        """Return the processes with the same parameters and tokens; they split samples."""
        return self._alike(process, cp=process.cp, tp=process.tp)

    def token_group(self, process: Process) -> tuple[int, ...]:
        """Return the processes with the same parameters and samples; they split tokens."""
        return self._alike(process, fsdp=process.fsdp, tp=process.tp)

    def tensor_group(self, process: Process) -> tuple[int, ...]:
        """Return the processes with the same samples and tokens; they split parameters."""
        return self._alike(process, fsdp=process.fsdp, cp=process.cp)

    def _alike(self, process: Process, **places: int) -> tuple[int, ...]:
        degrees = self.plan.degrees(process.rank)
        fsdp, cp, tp = (
            (places[name],) if name in places else range(getattr(degrees, name))
            for name in ("fsdp", "cp", "tp")
        )
        first = self._first[process.rank]
        return tuple(
            first + (f * degrees.cp + c) * degrees.tp + t for f, c, t in product(fsdp, cp, tp)
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All process groups of more than one process within a rank: the whole rank, and the data,
        sample, token and tensor groups."""
        several: dict[tuple[int, ...], None] = {}
        for process in self.all:
            _, fsdp, cp, tp = process
            # Each group is added when its first process is visited.
            groups = (
                (tuple(self.of_rank(process.rank)) if fsdp == cp == tp == 0 else ()),
                (self.data_group(process) if fsdp == cp == 0 else ()),
                (self.sample_group(process) if fsdp == 0 else ()),
                (self.token_group(process) if cp == 0 else ()),
                (self.tensor_group(process) if tp == 0 else ()),
            )
            several.update((group, None) for group in groups if len(group) > 1)
        return tuple(several)

    @cached_property
    def remote_edges(self) -> tuple[Edge, ...]:
        """Directed edges of messages between ranks: data edges and their reverses."""
        by_id = self.plan.by_id
        return tuple(
            edge
            for src, dst in self.plan.stage_edges
            if by_id[src].rank != by_id[dst].rank
            for edge in ((src, dst), (dst, src))
        )

    @cached_property
    def _forward_edges(self) -> frozenset[Edge]:
        return frozenset(self.plan.stage_edges)

    def p2p_groups(self, edge: Edge) -> tuple[P2PGroup, ...]:
        """Return the groups that exchange tensors on a directed edge. Within a module, processes
        keep their shares of samples and tokens; between modules, tensors are sent whole."""
        sender, receiver = (self.plan.by_id[stage] for stage in edge)
        senders, receivers = (tuple(self.of_rank(stage.rank)) for stage in (sender, receiver))
        forward = edge in self._forward_edges
        direction = Direction.FORWARD if forward else Direction.BACKWARD
        if sender.module != receiver.module:
            return (P2PGroup(senders, receivers, direction),)
        shares = (
            slice(index * sender.tp, (index + 1) * sender.tp)
            for index in range(sender.fsdp * sender.cp)
        )
        return tuple(P2PGroup(senders[share], receivers[share], direction) for share in shares)
