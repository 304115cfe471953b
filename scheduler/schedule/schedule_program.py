"""Conversion of a schedule to a program: adds messages before and after tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import Instruction, Op, Program, group_end
from raymm.scheduler.program.stage_samples import Samples, carried_samples, stage_samples
from raymm.scheduler.schedule.schedule_rules import Task
from raymm.scheduler.schedule.step_graph import ActiveStages

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
    last of them has run its backward.
    """
    surroundings = _Surroundings(plan, active)
    return Program(tuple(_with_messages(surroundings, rank, early) for rank in tasks))


def _with_messages(
    around: _Surroundings, tasks: Sequence[Task], early: bool
) -> tuple[Instruction, ...]:
    plan = around.plan
    messages = _RankMessages(around)
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
            samples = around.of(stage, microbatch).samples
            computes.append(
                Instruction(op, stage, microbatch, NO_STAGE, group, quota, samples=samples)
            )
        instructions += computes
        instructions += sends
        index = end
    return tuple(instructions)


class _Reader(NamedTuple):
    """A rank that reads a stage's output: the first stage that reads it, which names the message;
    the samples that it reads (empty for all); and the number of its stages that read it."""

    stage: StageId
    samples: tuple[Range, ...]
    count: int


class _Around(NamedTuple):
    """Context of a stage for a microbatch: its samples (empty for all), its producers on other
    ranks, each with the reader on its own rank, and other ranks that read its output."""

    samples: tuple[Range, ...]
    producers: tuple[tuple[StageId, _Reader], ...]
    readers: tuple[_Reader, ...]


class _Surroundings:
    """Senders and receivers around each stage, cached for microbatches with the same stages."""

    def __init__(self, plan: Plan, active: Sequence[ActiveStages]) -> None:
        self.plan, self.active = plan, active
        self._splits = plan.splits_samples
        self._around: dict[tuple[StageId, int], _Around] = {}

    def of(self, stage: StageId, microbatch: int) -> _Around:
        uses = self.active[microbatch]
        key = stage, id(uses)
        surroundings = self._around.get(key)
        if surroundings is None:
            surroundings = self._around[key] = self._surroundings(stage, uses, uses.samples)
        return surroundings

    def _surroundings(self, stage: StageId, uses: ActiveStages, samples: Samples) -> _Around:
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
        return _Around(
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
        read = carried_samples(self.plan, producer, readers, samples) if self._splits else ()
        return _Reader(readers[0], read, len(readers))


class _RankMessages:
    """Messages of one rank; methods return the sends and receives around tasks, in the order of
    tasks."""

    def __init__(self, around: _Surroundings) -> None:
        self._around = around
        # For outputs that several stages of the rank read: outputs that have arrived, and the
        # number of stages that have not yet contributed a gradient.
        self._arrived: set[tuple[StageId, int]] = set()
        self._left: dict[tuple[StageId, int], int] = {}

    def inputs(self, stage: StageId, microbatch: int) -> list[Instruction]:
        receives = []
        for producer, reader in self._around.of(stage, microbatch).producers:
            if reader.count > 1:
                if (producer, microbatch) in self._arrived:
                    continue
                self._arrived.add((producer, microbatch))
            receives.append(Instruction(
                Op.RECV, reader.stage, microbatch, producer, samples=reader.samples
            ))
        return receives

    def outputs(self, stage: StageId, microbatch: int) -> list[Instruction]:
        return [
            Instruction(Op.SEND, stage, microbatch, reader.stage, samples=reader.samples)
            for reader in self._around.of(stage, microbatch).readers
        ]

    def gradients(self, stage: StageId, microbatch: int) -> list[Instruction]:
        return [
            Instruction(
                Op.RECV, stage, microbatch, reader.stage, direction=Direction.BACKWARD,
                samples=reader.samples,
            )
            for reader in self._around.of(stage, microbatch).readers
        ]

    def handed_back(self, stage: StageId, microbatch: int) -> list[Instruction]:
        sends = []
        owed = self._around.active[microbatch].needs_backward
        for producer, reader in self._around.of(stage, microbatch).producers:
            if producer not in owed:
                continue
            if reader.count > 1:
                key = producer, microbatch
                self._left[key] = self._left.get(key, reader.count) - 1
                if self._left[key]:
                    continue
            sends.append(Instruction(
                Op.SEND, reader.stage, microbatch, producer, direction=Direction.BACKWARD,
                samples=reader.samples,
            ))
        return sends
