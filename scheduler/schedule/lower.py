"""Lowering: from a plan and the contents of a step's microbatches to the step's program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.schedule.memory import activation_peaks, equal_limits
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedule.step_graph import active_stages, full_samples, full_step
from raymm.scheduler.schedules.registry import find_schedule


def lower(
    plan: Plan,
    present: Sequence[Collection[str]],
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    forward_only: bool = False,
    delays: Mapping[Edge, float] | None = None,
    samples: Sequence[Samples] = (),
    featured: Sequence[Collection[str]] = (),
) -> Program:
    """Lower a plan to a program for one step, by the plan's schedule.

    Args:
        present: per microbatch, names of the modules that it has input for. Their consumers and
            modules that compute a loss always run. A step may have fewer microbatches than the plan
            (the last step of an evaluation).
        costs: seconds per (stage, op), to order stages that share a rank or have very different
            speeds; by default those of the plan's profile, if it has one.
        forward_only: True for evaluation: no stage has a backward.
        delays: seconds of a message per directed edge; 0 where missing.
        samples: samples of each microbatch, if replicas split them
            (:attr:`~raymm.scheduler.plan.plan.Plan.splits_samples`).
        featured: per microbatch, modules whose cached features replace their inputs; their first
            stages do not run.

    Returns:
        The program, without the collectives at its end.

    Raises:
        ValueError: ``present`` names an unknown module, or ``samples`` is missing although replicas
            split microbatches.
    """
    active = active_stages(plan, present, forward_only, samples, featured)
    return PlannedStep(plan, active, costs, delays, forward_only).program


def _full(
    plan: Plan, costs: Mapping[tuple[StageId, Op], float] | None = None,
    delays: Mapping[Edge, float] | None = None,
) -> PlannedStep:
    """Return a step with every modality in every microbatch."""
    active = active_stages(plan, full_step(plan), samples=full_samples(plan))
    return PlannedStep(plan, active, costs, delays)


def full_program(
    plan: Plan, *, delays: Mapping[Edge, float] | None = None
) -> Program:
    """Return the program of a step with every modality in every microbatch. If replicas split
    samples, their number is divisible by all replica counts."""
    return _full(plan, delays=delays).program


def iteration_time(
    plan: Plan,
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    delays: Mapping[Edge, float] | None = None,
) -> float:
    """Return the seconds that :func:`~raymm.scheduler.schedule.simulate.simulate` predicts for
    :func:`full_program`. Costs are by default those of the plan's profile; ``delays`` are seconds
    of a message per directed edge."""
    return _full(plan, costs, delays).seconds()


class Forecast(NamedTuple):
    """Seconds of a plan's step, and peak bytes of activations per rank."""

    seconds: float
    activation_peaks: tuple[int, ...]


def forecast(plan: Plan, transfers: Mapping[Edge, Transfer]) -> Forecast:
    """Forecast a step of :func:`full_program` for a plan with a profile, usually without creating
    the program. The results equal those of :func:`~raymm.scheduler.schedule.simulate.simulate` and
    :func:`.memory.activation_peaks`. The order of work does not depend on ``transfers``."""
    step = _full(plan)
    return Forecast(step.seconds(transfers), step.peaks())


def refine(
    plan: Plan, delays: Mapping[Edge, float] | None = None
) -> tuple[Plan, float]:
    """Return a plan that lowers quickly, and its :func:`iteration_time`. A plan without policy
    whose schedule searches for one gets the best policy of a local search, so that lowering it does
    not try several."""
    step = _full(plan, delays=delays)
    schedule = find_schedule(plan.schedule)
    if plan.policy is not None or not schedule.searches_policy:
        return plan, step.seconds()
    policy, seconds = schedule.tuned(step)
    return plan if policy is None else replace(plan, policy=policy), seconds


def one_f_one_b_limits(
    plan: Plan, baseline: Program, sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    """Return the bytes of activations per rank that need no more memory than the plan's 1F1B
    program."""
    return equal_limits(plan, activation_peaks(baseline, sizes, group_spans(plan)), sizes)
