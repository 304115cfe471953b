"""From a plan's ranks to processes: a rank with context or tensor parallelism is several.

The processes of a rank form a grid: those that differ in their ``cp`` place share every
sample's tokens, those that differ in ``tp`` share every layer's parameters. All of them run
the rank's instructions in the same order, so a step is scheduled, checked and simulated for
ranks, and what the processes of a rank have to tell one another cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from raymm.scheduler.plan import Plan
from raymm.scheduler.resharding import Resharding


class Process(NamedTuple):
    """One process: the plan's rank, and its place in the rank's grid."""

    rank: int
    cp: int
    tp: int


class Lane(NamedTuple):
    """Processes at both ends of an edge that have a tensor in common: the senders all hold it,
    the receivers are all to have it. By number."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def resharding(self) -> Resharding:
        return Resharding(len(self.senders), len(self.receivers))


Edge = tuple[str, str]


def lanes_between_ranks(
    edges: Sequence[Edge], ranks: Mapping[str, int]
) -> tuple[tuple[Edge, tuple[Lane, ...]], ...]:
    """The lanes of messages along data edges and back, where every rank is one process.

    Args:
        edges: data edges between stages.
        ranks: of every stage.
    """
    return tuple(
        (edge, (Lane((ranks[edge[0]],), (ranks[edge[1]],)),))
        for src, dst in edges
        if ranks[src] != ranks[dst]
        for edge in ((src, dst), (dst, src))
    )


class Processes:
    """A plan's processes, numbered rank by rank, tensor-parallel neighbours next to each other.

    Attributes:
        plan: the plan.
        all: every process, in order of its number.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.all = tuple(
            Process(rank, cp, tp)
            for rank in range(plan.num_ranks)
            for cp in range(plan.degrees(rank).cp)
            for tp in range(plan.degrees(rank).tp)
        )
        counts = [plan.processes(rank) for rank in range(plan.num_ranks)]
        self._first = list(accumulate(counts, initial=0))

    def of_rank(self, rank: int) -> range:
        """The numbers of all of a rank's processes."""
        return range(self._first[rank], self._first[rank + 1])

    def token_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share a sample's tokens with one, and have its parameters."""
        cp, tp = self.plan.degrees(process.rank)
        first = self._first[process.rank]
        return tuple(first + c * tp + process.tp for c in range(cp))

    def tensor_group(self, process: Process) -> tuple[int, ...]:
        """The processes that share parameters with one, and have its tokens."""
        tp = self.plan.degrees(process.rank).tp
        first = self._first[process.rank] + process.cp * tp
        return tuple(range(first, first + tp))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group of several processes within a rank: all of them, and by tokens and by
        parameters."""
        found: dict[tuple[int, ...], None] = {}
        for process in self.all:
            for group in (
                tuple(self.of_rank(process.rank)),
                self.token_group(process),
                self.tensor_group(process),
            ):
                if len(group) > 1:
                    found[group] = None
        return tuple(found)

    @cached_property
    def remote_edges(self) -> tuple[Edge, ...]:
        """Directed edges of messages between ranks: data edges, and their reverse."""
        by_name = self.plan.by_name
        return tuple(
            edge
            for src, dst in self.plan.stage_edges
            if by_name[src].rank != by_name[dst].rank
            for edge in ((src, dst), (dst, src))
        )

    def lanes(self, edge: Edge) -> tuple[Lane, ...]:
        """Who has messages with whom on a directed edge. Within a module, processes keep their
        share of the tokens; what a module hands to another is whole."""
        sender, receiver = (self.plan.by_name[stage] for stage in edge)
        theirs = tuple(tuple(self.of_rank(stage.rank)) for stage in (sender, receiver))
        if sender.module != receiver.module:
            return (Lane(*theirs),)
        tp = sender.tp
        return tuple(
            Lane(*(numbers[c * tp : (c + 1) * tp] for numbers in theirs))
            for c in range(sender.cp)
        )
