"""From a plan's ranks to processes: a rank may be a grid of several.

Processes that differ in their ``fsdp`` place share every microbatch's samples, those that differ
in ``cp`` every sample's tokens, and those that differ in ``tp`` every layer's parameters. All of
them run the rank's instructions in the same order, so a step is scheduled, checked and simulated
for ranks, and what the processes of a rank have to tell one another cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.resharding import Resharding
from raymm.scheduler.plan.stage import Edge


class Process(NamedTuple):
    """One process: the plan's rank, and its place in the rank's grid."""

    rank: int
    fsdp: int
    cp: int
    tp: int


class P2PGroup(NamedTuple):
    """Processes at both ends of an edge that have a tensor in common.

    Attributes:
        senders: numbers of the processes that all hold it.
        receivers: numbers of those that are all to have it.
        direction: what it is: an output on its way forward, or a gradient.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    direction: Direction

    @property
    def resharding(self) -> Resharding:
        return Resharding(len(self.senders), len(self.receivers))


def connected_pairs(p2p_groups: Iterable[tuple[Edge, Iterable[P2PGroup]]]) -> dict[
    tuple[int, int], None
]:
    """The ordered pairs of processes of which the first has messages for the second, on any edge;
    in the order of the edges.

    Args:
        p2p_groups: of every directed edge, who has messages with whom.
    """
    return {
        (p2p_group.senders[sender], p2p_group.receivers[receiver]): None
        for _, of_edge in p2p_groups
        for p2p_group in of_edge
        for sender, receiver in p2p_group.resharding.links()
    }


class Processes:
    """A plan's processes, numbered rank by rank, tensor-parallel neighbours next to each other.

    Attributes:
        plan: the plan.
        all: every process, in order of its number.
    """

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
        """The numbers of all of a rank's processes."""
        return range(self._first[rank], self._first[rank + 1])

    def data_place(self, process: Process) -> int:
        """Its place in its :meth:`data_group`."""
        return process.fsdp * self.plan.degrees(process.rank).cp + process.cp

    def data_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share a microbatch with one, its samples or their tokens, and have
        its part of the layers."""
        return self._alike(process, tp=process.tp)

    def sample_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share a microbatch's samples with one, and have its tokens of each
        and its part of the layers."""
        return self._alike(process, cp=process.cp, tp=process.tp)

    def token_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share the tokens of one's samples, and have its part of the
        layers."""
        return self._alike(process, fsdp=process.fsdp, tp=process.tp)

    def tensor_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share parameters with one, and have its tokens."""
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
        """Every group of several processes within a rank: all of them, and by what they share."""
        several: dict[tuple[int, ...], None] = {}
        for process in self.all:
            _, fsdp, cp, tp = process
            # Each when its first process comes.
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
        """Directed edges of messages between ranks: data edges, and their reverse."""
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
        """Who has messages with whom on a directed edge. Within a module, processes keep their
        share of the samples and tokens; what a module hands to another is whole."""
        sender, receiver = (self.plan.by_id[stage] for stage in edge)
        senders, receivers = (tuple(self.of_rank(stage.rank)) for stage in (sender, receiver))
        forward = edge in self._forward_edges
        direction = Direction.FORWARD if forward else Direction.BACKWARD
        if sender.module != receiver.module:
            return (P2PGroup(senders, receivers, direction),)
        shares = (
            slice(place * sender.tp, (place + 1) * sender.tp)
            for place in range(sender.fsdp * sender.cp)
        )
        return tuple(P2PGroup(senders[own], receivers[own], direction) for own in shares)
