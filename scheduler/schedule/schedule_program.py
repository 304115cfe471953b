"""Conversion of a schedule to a program: adds messages before and after tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId
from raymm.scheduler.program.program import Instruction, Op, Program, group_end
from raymm.scheduler.program.stage_samples import Samples, carried_samples, stage_samples
from raymm.scheduler.schedule.step_graph import ActiveStages
from raymm.scheduler.schedules.base import Task

_HANDS_BACK = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


def to_program(
    plan: Plan,
    active: Sequence[ActiveStages],
    tasks: Sequence[Sequence[Task]],
    early: bool = True,
) -> Program:
    """Return a schedule's tasks with their messages; those of a group come before and after all of
    it. ``early`` is True if a recomputation does not wait for its gradient.

    A rank receives the output of a stage once, for all of its stages that read it; the message
    names the first of these stages. Their gradients are summed on that rank and sent back once the
    last of them has run its backward. Which stages read the output may differ between microbatches,
    so a later microbatch may be read, or its gradient complete, before an earlier one: the earlier
    message is then received first, and the later gradient sent after the earlier one.
    """
    peers = _Peers(plan, active)
    return Program(tuple(_with_messages(peers, rank, early) for rank in tasks))


def _with_messages(
    peers: _Peers, tasks: Sequence[Task], early: bool
) -> tuple[Instruction, ...]:
    plan = peers.plan
    messages = _RankMessages(peers)
    instructions: list[Instruction] = []
    index = 0
    while index < len(tasks):
        end = group_end(tasks, index)
        computes: list[Instruction] = []
        sends: list[Instruction] = []
        for task in tasks[index:end]:
            stage, microbatch, op, group, quota = task
            if op in _HANDS_BACK:
                if early or not plan.by_id[stage].recompute:
                    instructions += messages.gradients(stage, microbatch)
                sends += messages.handed_back(stage, microbatch)
            elif op is Op.RECOMPUTE:
                if not early:  # the gradient is received before recomputation and backward
                    instructions += messages.gradients(stage, microbatch)
            elif op is not Op.BACKWARD_WEIGHT:
                instructions += messages.inputs(stage, microbatch)
                sends += messages.outputs(stage, microbatch)
            samples = peers.of(stage, microbatch).samples
            computes.append(
                Instruction(op, stage, microbatch, NO_STAGE, group, quota, samples=samples)
            )
        instructions += computes
        instructions += sends
        index = end
    return tuple(instructions)


class _Reader(NamedTuple):
    """A rank that reads a stage's output: the first stage that reads it, which names the message;
    the samples that it reads (empty for all); the number of its stages that read it; and True in
    ``shared`` if several of its stages do so in some microbatch."""

    stage: StageId
    samples: tuple[Range, ...]
    count: int
    shared: bool


class _StagePeers(NamedTuple):
    """Context of a stage for a microbatch: its samples (empty for all), its producers on other
    ranks, each with the reader on its own rank, and other ranks that read its output."""

    samples: tuple[Range, ...]
    producers: tuple[tuple[StageId, _Reader], ...]
    readers: tuple[_Reader, ...]

    def reader(self, producer: StageId, stage: StageId) -> _Reader | None:
        """Return the reader of a producer's message that ``stage`` names, if there is one."""
        for other, reader in self.producers:
            if other == producer and reader.stage == stage:
                return reader
        return None


class _Peers:
    """Senders and receivers around each stage, cached for microbatches with the same stages."""

    def __init__(self, plan: Plan, active: Sequence[ActiveStages]) -> None:
        self.plan, self.active = plan, active
        self._splits = plan.splits_samples
        self._cached: dict[tuple[StageId, int], _StagePeers] = {}

    def of(self, stage: StageId, microbatch: int) -> _StagePeers:
        uses = self.active[microbatch]
        key = stage, id(uses)
        stage_peers = self._cached.get(key)
        if stage_peers is None:
            stage_peers = self._cached[key] = self._find(stage, uses, uses.samples)
        return stage_peers

    def _find(self, stage: StageId, uses: ActiveStages, samples: Samples) -> _StagePeers:
        plan = self.plan
        rank = plan.by_id[stage].rank
        producers = []
        for producer in plan.stage_producers[stage]:
            if producer in uses.stages and plan.by_id[producer].rank != rank:
                readers = self._readers(producer, rank, uses, samples)
                if stage in readers:
                    producers.append((producer, self._reader(producer, readers, samples)))
        ranks = dict.fromkeys(plan.by_id[c].rank for c in plan.stage_consumers[stage])
        rank_readers = (self._readers(stage, peer, uses, samples) for peer in ranks if peer != rank)
        local_samples = stage_samples(plan, plan.by_id[stage], samples) if self._splits else ()
        return _StagePeers(
            local_samples, tuple(producers),
            tuple(self._reader(stage, readers, samples) for readers in rank_readers if readers),
        )

    def _readers(
        self, producer: StageId, rank: int, uses: ActiveStages, samples: Samples
    ) -> list[StageId]:
        return [
            c for c in self.plan.stage_consumers[producer]
            if c in uses.stages and self.plan.by_id[c].rank == rank
            and uses.carries(self.plan.edge_ports[producer, c])
            and (not self._splits or carried_samples(self.plan, producer, [c], samples))
        ]

    def _reader(self, producer: StageId, readers: list[StageId], samples: Samples) -> _Reader:
        plan, first = self.plan, readers[0]
        read = carried_samples(plan, producer, readers, samples) if self._splits else ()
        rank = plan.by_id[first].rank
        shared = sum(plan.by_id[c].rank == rank for c in plan.stage_consumers[producer]) > 1
        return _Reader(first, read, len(readers), shared)


class _RankMessages:
    """Messages of one rank; methods return the sends and receives around tasks, in the order of
    tasks, and on each edge in the order of microbatches."""

    def __init__(self, peers: _Peers) -> None:
        self._peers = peers
        # For outputs that several stages of the rank read, by producer and the stage that names the
        # message: the next microbatches to receive and to send a gradient for.
        self._receive: dict[Edge, int] = {}
        self._return: dict[Edge, int] = {}
        # Number of stages that have contributed to the gradient of a producer's output.
        self._contributed: dict[tuple[StageId, int], int] = {}

    def inputs(self, stage: StageId, microbatch: int) -> list[Instruction]:
        receives = []
        for producer, reader in self._peers.of(stage, microbatch).producers:
            due = [(microbatch, reader)]
            if reader.shared:
                edge = producer, reader.stage
                due = list(self._on_edge(edge, self._receive.get(edge, 0), microbatch + 1))
                self._receive[edge] = max(self._receive.get(edge, 0), microbatch + 1)
            receives += [
                Instruction(Op.RECV, reader.stage, number, producer, samples=reader.samples)
                for number, reader in due
            ]
        return receives

    def outputs(self, stage: StageId, microbatch: int) -> list[Instruction]:
        return [
            Instruction(Op.SEND, stage, microbatch, reader.stage, samples=reader.samples)
            for reader in self._peers.of(stage, microbatch).readers
        ]

    def gradients(self, stage: StageId, microbatch: int) -> list[Instruction]:
        return [
            Instruction(
                Op.RECV, stage, microbatch, reader.stage, direction=Direction.BACKWARD,
                samples=reader.samples,
            )
            for reader in self._peers.of(stage, microbatch).readers
        ]

    def handed_back(self, stage: StageId, microbatch: int) -> list[Instruction]:
        sends = []
        needs = self._peers.active[microbatch].needs_backward
        for producer, reader in self._peers.of(stage, microbatch).producers:
            if producer not in needs:
                continue
            due = [(microbatch, reader)]
            if reader.shared:
                key = producer, microbatch
                self._contributed[key] = self._contributed.get(key, 0) + 1
                due = self._complete((producer, reader.stage))
            sends += [
                Instruction(
                    Op.SEND, reader.stage, number, producer, direction=Direction.BACKWARD,
                    samples=reader.samples,
                )
                for number, reader in due
            ]
        return sends

    def _complete(self, edge: Edge) -> list[tuple[int, _Reader]]:
        """Return the next microbatches of an edge as far as their gradients are complete."""
        producer, complete = edge[0], []
        active = self._peers.active
        for number, reader in self._on_edge(edge, self._return.get(edge, 0), len(active)):
            if producer in active[number].needs_backward:
                if self._contributed.get((producer, number), 0) < reader.count:
                    break
                complete.append((number, reader))
            self._return[edge] = number + 1
        return complete

    def _on_edge(self, edge: Edge, first: int, end: int) -> Iterator[tuple[int, _Reader]]:
        """Yield the microbatches in a range that have a message on an edge."""
        for number in range(first, end):
            reader = self._peers.of(edge[1], number).reader(*edge)
            if reader is not None:
                yield number, reader
