"""Lowering: from a plan, and what a step's microbatches contain, to the step's program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.policy import Policy, policies
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.memory import activation_peaks, beside_activations
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.schedule_program import to_program
from raymm.scheduler.schedule.schedule_rules import NoRoomError, Rules, Schedule
from raymm.scheduler.schedule.stage_costs import StageCost, op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step


def lower(
    plan: Plan,
    present: Sequence[Collection[str]],
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    forward_only: bool = False,
    delays: Mapping[Edge, float] | None = None,
) -> Program:
    """Lower a plan to a program for one step, by the plan's schedule.

    1F1B on a DAG: a stage's warm-up depth is its longest path to the loss (Cornstarch v1 §4.1,
    Fig. 6). Each rank runs, whenever it is free, the ready forward of the oldest microbatch (of
    two stages the one nearest to the loss), else the ready backward of the oldest, and never
    holds more microbatches of a stage than the stage's depth. On a chain with one stage per
    rank and equal costs this is textbook 1F1B. Forwards go first because other ranks wait for
    them; on a rank that several stages share, backwards first would drain the pipeline after
    it.

    Args:
        plan: the plan.
        present: per microbatch, the names of the modules it has input for besides the
            sink (which always runs). Whatever takes their outputs runs as well. A step
            may have fewer microbatches than the plan (the last one of an evaluation).
        costs: seconds per (stage, op), to order work of stages that share a rank or have
            very different speeds; the plan's own where it has a profile.
        forward_only: for evaluation: no stage has a backward.
        delays: seconds a message takes, per directed edge; 0 where missing.

    Returns:
        The program, without collective epilogue.

    Raises:
        ValueError: if ``present`` names a module that the plan does not have.
    """
    active = active_stages(plan, present, forward_only)
    scheduler = ListScheduler(plan, active, *_known_costs(plan, costs), delays)
    return to_program(plan, active, _schedule(scheduler, forward_only))


def full_program(
    plan: Plan, *, delays: Mapping[Edge, float] | None = None
) -> Program:
    """:func:`lower`'s program of a step with every modality in every microbatch."""
    return lower(plan, full_step(plan), delays=delays)


def iteration_time(
    plan: Plan,
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    delays: Mapping[Edge, float] | None = None,
) -> float:
    """Seconds of a step with every modality in every microbatch: what
    :func:`~raymm.scheduler.schedule.simulate.simulate` says of :func:`full_program`.

    Args:
        plan: whose stages run.
        costs: seconds by stage and operation; default: from the plan's profile.
        delays: seconds of a message, by the stages that send and receive it.
    """
    active = active_stages(plan, full_step(plan))
    scheduler = ListScheduler(plan, active, *_known_costs(plan, costs), delays)
    return scheduler.replayed(_schedule(scheduler, False))


class Forecast(NamedTuple):
    """What a step of a plan takes: seconds, and bytes of activations per rank."""

    seconds: float
    activation_peaks: tuple[int, ...]


def forecast(plan: Plan, transfers: Mapping[Edge, Transfer]) -> Forecast:
    """Of :func:`full_program`, what :func:`~raymm.scheduler.schedule.simulate.simulate` and
    :func:`.memory.activation_peaks` say, but without making it.

    Args:
        plan: with a profile.
        transfers: what messages take. The order of work does not know of them.
    """
    active = active_stages(plan, full_step(plan))
    costs, sizes = _known_costs(plan, None)
    scheduler = ListScheduler(plan, active, costs, sizes)
    schedule = _schedule(scheduler, False)
    return Forecast(
        scheduler.replayed(schedule, transfers, costs), scheduler.activation_peaks(schedule)
    )


def _known_costs(
    plan: Plan, costs: Mapping[tuple[StageId, Op], float] | None
) -> tuple[Mapping[tuple[StageId, Op], float], Mapping[StageId, StageCost]]:
    if plan.profile is None:
        return costs or {}, {}
    return op_seconds(plan) if costs is None else costs, stage_costs(plan)


def _schedule(scheduler: ListScheduler, forward_only: bool) -> Schedule:
    plan = scheduler.plan
    if plan.schedule == "gpipe":
        return scheduler.run(Rules(flush=True))
    if plan.schedule == "zero_bubble" and not forward_only:
        return _zero_bubble(scheduler)[0]
    return scheduler.run(Rules())


def _replayed(scheduler: ListScheduler, schedule: Schedule) -> Schedule:
    """A schedule with its program's time."""
    return replace(schedule, makespan=scheduler.replayed(schedule))


def _zero_bubble(scheduler: ListScheduler) -> tuple[Schedule, Policy | None]:
    """The best of several list schedules within 1F1B's activation memory, and its policy
    (None for 1F1B itself).

    B_w is a task of its own (Zero Bubble, Qi et al. 2024: it fills the drain), a
    recomputation may start before its gradient arrives (a frozen model has no B_w; this is
    where it gains), and 1F1B itself is among the candidates, so the result is never slower.
    """
    plan = scheduler.plan
    baseline = _replayed(scheduler, scheduler.run(Rules()))
    best, chosen = None, None
    stuck: NoRoomError | None = None
    limits = plan.activation_limits or _limits(
        plan, scheduler.activation_peaks(baseline), scheduler.sizes
    )
    shared = any(len(plan.rank_stages(rank)) > 1 for rank in range(plan.num_ranks))
    for policy in policies(shared) if plan.policy is None else (plan.policy,):
        try:
            tried = scheduler.run(
                Rules(policy, split=True, early_recompute=True, byte_limits=tuple(limits))
            )
        except NoRoomError as error:  # where stages of one rank wait for each other
            stuck = error
            continue
        if best is None or tried.makespan < best.makespan:
            best, chosen = tried, policy
    if best is not None:
        best = _replayed(scheduler, best)
    if plan.activation_limits is None and (best is None or baseline.makespan <= best.makespan):
        return baseline, None
    if best is None:
        assert stuck is not None  # every policy was
        raise stuck
    return best, chosen


def refine(
    plan: Plan, delays: Mapping[Edge, float] | None = None
) -> tuple[Plan, float]:
    """A plan whose lowerings are quick, and its :func:`iteration_time`: a zero-bubble plan
    without policy gets the best one."""
    active = active_stages(plan, full_step(plan))
    scheduler = ListScheduler(plan, active, *_known_costs(plan, None), delays)
    if plan.schedule != "zero_bubble" or plan.policy is not None:
        return plan, scheduler.replayed(_schedule(scheduler, False))
    schedule, policy = _zero_bubble(scheduler)
    return plan if policy is None else replace(plan, policy=policy), schedule.makespan


def one_f_one_b_limits(
    plan: Plan, baseline: Program, sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    """Bytes of activations per rank that cost no more memory than 1F1B does.

    Devices are alike, so what counts is the rank that needs most (as Zero Bubble counts its
    memory): any rank may hold as much as 1F1B's fullest does, as long as weights and
    optimizer state leave room for it.

    Args:
        plan: whose stages run.
        baseline: the plan's 1F1B.
        sizes: bytes of every stage.
    """
    return _limits(plan, activation_peaks(baseline, sizes), sizes)


def _limits(
    plan: Plan, peaks: Sequence[int], sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    costs = [
        [sizes[s.id] for s in plan.rank_stages(rank) if s.id in sizes]
        for rank in range(plan.num_ranks)
    ]
    others = [beside_activations(own) for own in costs]
    device = max(p + b for p, b in zip(peaks, others, strict=True))
    # What a backward has for a time is no microbatch's that could be held back.
    return tuple(
        max(peak, min(max(peaks), device - own)) - max((c.remade_bytes for c in rank), default=0)
        for peak, own, rank in zip(peaks, others, costs, strict=True)
    )
