"""Step of a plan: its tasks, their order by the plan's schedule, and its program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from raymm.errors import USER_CODE_RAISES, InternalError, PlanError
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import NO_STAGE, Edge, Stage, StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import Instruction, Op, Program, group_end
from raymm.scheduler.program.stage_samples import Samples, carried_samples, stage_samples
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.list_schedule import ListScheduler, StepSchedule
from raymm.scheduler.schedule.memory import activation_peaks, equal_limits
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import group_seconds, op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import ActiveStages
from raymm.scheduler.schedule.step_parts import Loads, loaded
from raymm.scheduler.schedules.base import Task
from raymm.scheduler.schedules.registry import find_schedule


class PlannedStep(ListScheduler):
    """Step that the plan's schedule orders. It implements
    :class:`~raymm.scheduler.schedules.base.Step`, the view of custom schedules; list schedules also
    use the methods of the list scheduler.

    Args:
        active: stages that each microbatch uses.
        costs: seconds per (stage, compute op); by default those of the plan's profile, if it has
            one.
        delays: seconds of a message per directed edge; 0 where missing.
        forward_only: True for evaluation: no stage has a backward.
        loads: factors of seconds and bytes of every microbatch, by module; 1 where missing.
        until: seconds after which the step is of no interest. :meth:`seconds` of a step that takes
            longer may be infinite, and such a step has no program.
    """

    def __init__(
        self,
        plan: Plan,
        active: Sequence[ActiveStages],
        costs: Mapping[tuple[StageId, Op], float] | None = None,
        delays: Mapping[Edge, float] | None = None,
        forward_only: bool = False,
        loads: Loads | None = None,
        until: float = float("inf"),
    ) -> None:
        sizes = {} if plan.profile is None else stage_costs(plan)
        if costs is None:
            costs = {} if plan.profile is None else op_seconds(plan)
        super().__init__(plan, active, costs, sizes, delays, loads)
        self.forward_only = forward_only
        self.until = float("inf") if self._needs_simulator else until

    def with_loads(
        self, schedule: str, loads: Loads, until: float = float("inf")
    ) -> PlannedStep:
        """Return the step with other loads of the same microbatches, under a schedule."""
        plan = self.plan if schedule == self.plan.schedule else replace(
            self.plan, schedule=schedule
        )
        step = PlannedStep(
            plan, self.active, self.costs, self.delays, self.forward_only, loads, until
        )
        step.parts = [loaded(part, loads) for part in self.parts]
        return step

    @property
    def num_microbatches(self) -> int:
        return len(self.active)

    def stages(self, rank: int) -> Sequence[Stage]:
        """Return the stages of a rank, from the inputs to the loss."""
        return self.plan.rank_stages(rank)

    def forwards(self, stage: Stage, microbatch: int) -> tuple[Task, ...]:
        """Return the forward of a stage on a microbatch, if the stage runs it."""
        uses = self.active[microbatch]
        if stage.id not in uses.stages:
            return ()
        op = Op.FORWARD_NO_GRAD
        if stage.id in uses.needs_backward:
            op = Op.FORWARD_CHECKPOINTED if stage.recompute else Op.FORWARD
        return (Task(stage.id, microbatch, op),)

    def backwards(self, stage: Stage, microbatch: int) -> tuple[Task, ...]:
        """Return the recomputation and the backward of a stage on a microbatch, as far as it has
        them."""
        if stage.id not in self.active[microbatch].needs_backward:
            return ()
        ops = (Op.RECOMPUTE, Op.BACKWARD) if stage.recompute else (Op.BACKWARD,)
        return tuple(Task(stage.id, microbatch, op) for op in ops)

    @cached_property
    def listed(self) -> StepSchedule | None:
        """Order of the tasks as arrays; None if the schedule has only an order of each rank."""
        return find_schedule(self.plan.schedule).listed(self)

    def reloaded(self, loads: Loads) -> StepSchedule:
        """Return the order of the tasks, which must be listed, with other loads of the same
        microbatches."""
        assert self.listed is not None
        return replace(self.listed, parts=tuple(loaded(part, loads) for part in self.parts))

    def timed(self, schedule: StepSchedule) -> StepSchedule:
        """Return a schedule with the time of its program."""
        return replace(schedule, makespan=self.replayed(schedule))

    def equal_limits(self, schedule: StepSchedule) -> tuple[int, ...]:
        """Return the bytes of activations per rank that need no more memory than a schedule
        (:func:`~raymm.scheduler.schedule.memory.equal_limits`)."""
        return equal_limits(self.plan, self.activation_peaks(schedule), self.sizes)

    def lower_bound(self, limits: Sequence[float]) -> float:
        """Return a lower bound in seconds of a full step, with bytes of activations per rank."""
        return lower_bound(self.plan, self.delays, dict(enumerate(limits)))

    @cached_property
    def program(self) -> Program:
        """Program of the step, without the collectives at its end. Raises ``PlanError`` if the
        order of a custom schedule cannot run."""
        if self.listed is not None:
            return to_program(self.plan, self.active, self.listed.tasks, self.listed.early)
        schedule = find_schedule(self.plan.schedule)
        if schedule.proven:
            ranks = range(self.plan.num_ranks)
            return to_program(self.plan, self.active, [schedule.order(self, r) for r in ranks])
        tasks = [self._checked_order(rank) for rank in range(self.plan.num_ranks)]
        program = to_program(self.plan, self.active, tasks)
        try:
            check_program(program)
        except InternalError as error:
            raise PlanError(
                f"schedule {self.plan.schedule!r} cannot run: {error}; accepted: orders in which "
                "no rank waits forever"
            ) from None
        return program

    def _checked_order(self, rank: int) -> Sequence[Task]:
        """Return the tasks of a rank in the order of a custom schedule. Raise ``PlanError`` unless
        every task is in it once."""
        name = self.plan.schedule
        try:
            tasks = list(find_schedule(name).order(self, rank))
        except USER_CODE_RAISES as error:
            raise PlanError(
                f"schedule {name!r} raised {type(error).__name__} for rank {rank}: {error}"
            ) from error
        expected = Counter(
            task for stage in self.stages(rank) for microbatch in range(self.num_microbatches)
            for task in (*self.forwards(stage, microbatch), *self.backwards(stage, microbatch))
        )
        counts = Counter(tasks)
        if counts != expected:
            task = next(iter((expected - counts) or (counts - expected)))
            shown = f"{task.op} of {task.stage} on microbatch {task.microbatch}" if isinstance(
                task, Task
            ) else f"{task!r:.80}"
            raise PlanError(
                f"schedule {name!r} runs {shown} {counts[task]} times on rank {rank}; accepted: "
                "every task of step.forwards and step.backwards, once"
            )
        return tasks

    def seconds(self, transfers: Mapping[Edge, Transfer] | None = None) -> float:
        """Return the seconds of the step that the simulator finds.

        Args:
            transfers: times of messages, which do not change the order of work; by default the
                delays of the schedule.
        """
        if not self._needs_simulator and self.listed is not None:
            if self.listed.makespan == float("inf"):
                return self.listed.makespan
            return self.replayed(self.listed, transfers, None if transfers is None else self.costs)
        if transfers is None:
            transfers = {edge: Transfer(0.0, delay) for edge, delay in self.delays.items()}
        return simulate(
            self.program, self.costs, transfers=transfers, spans=group_spans(self.plan),
            group_seconds=group_seconds(self.plan, self.costs), posted=self.plan.posted_receives,
        ).makespan

    def peaks(self) -> tuple[int, ...]:
        """Return the peak bytes of activations of each rank."""
        if not self._needs_simulator and self.listed is not None:
            return self.activation_peaks(self.listed)
        return activation_peaks(self.program, self.sizes, group_spans(self.plan))

    @cached_property
    def _needs_simulator(self) -> bool:
        """True if only the simulator can time modules that run side by side or share forwards of
        several microbatches."""
        on_quota = any(stage.quota is not None for stage in self.plan.stages) and (
            group_seconds(self.plan) is not None
        )
        return on_quota or bool(group_spans(self.plan))


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
