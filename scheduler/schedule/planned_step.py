"""Step of a plan: its tasks, their order by the plan's schedule, and its program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from raymm.errors import USER_CODE_RAISES, InternalError, PlanError
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, Stage, StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.memory import activation_peaks, equal_limits
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.schedule_program import to_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import group_seconds, op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import ActiveStages
from raymm.scheduler.schedule.step_parts import Loads, loaded
from raymm.scheduler.schedule.step_schedule import StepSchedule
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
