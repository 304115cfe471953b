"""Lowering: from a plan and the contents of a step's microbatches to the step's program."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.policy import Policy, policies
from raymm.scheduler.plan.rank_quotas import SLOTS
from raymm.scheduler.plan.stage import Edge, Stage, StageId
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.memory import activation_peaks, beside_activations
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.schedule_program import to_program
from raymm.scheduler.schedule.schedule_rules import Rules, Schedule, Task
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import (
    StageCost,
    group_seconds,
    op_seconds,
    stage_costs,
)
from raymm.scheduler.schedule.step_graph import ActiveStages, active_stages, full_samples, full_step


def slot_tasks(plan: Plan, active: Sequence[ActiveStages]) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each rank, in order, microbatch by microbatch: forward through the slots,
    then backward in reverse (Mosaic §3). ``active`` has the stages that each microbatch uses."""
    return tuple(_rank_tasks(plan, rank, active) for rank in range(plan.num_ranks))


def _rank_tasks(plan: Plan, rank: int, active: Sequence[ActiveStages]) -> tuple[Task, ...]:
    slots: dict[int, list[Stage]] = {}
    for stage in plan.rank_stages(rank):
        slots.setdefault(stage.slot or 0, []).append(stage)
    order = sorted(slots)
    tasks: list[Task] = []
    group = 0
    for microbatch, uses in enumerate(active):
        for ops_of, passed in ((_forwards, order), (_backwards, order[::-1])):
            for slot in passed:
                for stage in slots[slot]:
                    group_quota = (-1, 1.0) if stage.quota is None else (group, stage.quota)
                    tasks += [
                        Task(stage.id, microbatch, op, *group_quota) for op in ops_of(stage, uses)
                    ]
                group += 1
    return tuple(tasks)


def _forwards(stage: Stage, uses: ActiveStages) -> tuple[Op, ...]:
    if stage.id not in uses.stages:
        return ()
    if stage.id not in uses.needs_backward:
        return (Op.FORWARD_NO_GRAD,)
    return (Op.FORWARD_CHECKPOINTED if stage.recompute else Op.FORWARD,)


def _backwards(stage: Stage, uses: ActiveStages) -> tuple[Op, ...]:
    if stage.id not in uses.needs_backward:
        return ()
    return (Op.RECOMPUTE, Op.BACKWARD) if stage.recompute else (Op.BACKWARD,)


# Limits of the local search for a policy: rounds, and scheduled tasks, which bound its time.
TUNING_ROUNDS = 200
TUNED_TASKS = 200_000
# Number of best policies that the local search starts with.
TUNED_POLICIES = 2
# The local search stops this close to the lower bound.
CLOSE = 1.002


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

    1F1B on a DAG: the warm-up depth of a stage is its longest path to the loss (Cornstarch v1 §4.1,
    Fig. 6). Whenever a rank is free, it runs the ready forward of the oldest microbatch (of two
    stages, the one nearest to the loss), else the ready backward of the oldest. A stage never holds
    more microbatches than its depth. On a chain with one stage per rank and equal costs this is
    textbook 1F1B. Forwards go first because other ranks wait for them; on a rank that several
    stages share, backwards first would drain the pipeline after it.

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
    if plan.schedule == SLOTS:
        return to_program(plan, active, slot_tasks(plan, active))
    scheduler = ListScheduler(plan, active, *_known_costs(plan, costs), delays)
    schedule = _schedule(scheduler, forward_only)
    return to_program(plan, active, schedule.tasks, schedule.early)


def full_program(
    plan: Plan, *, delays: Mapping[Edge, float] | None = None
) -> Program:
    """Return the program of a step with every modality in every microbatch. If replicas split
    samples, their number is divisible by all replica counts."""
    return lower(plan, full_step(plan), delays=delays, samples=full_samples(plan))


def iteration_time(
    plan: Plan,
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    delays: Mapping[Edge, float] | None = None,
) -> float:
    """Return the seconds that :func:`~raymm.scheduler.schedule.simulate.simulate` predicts for
    :func:`full_program`. Costs are by default those of the plan's profile; ``delays`` are seconds
    of a message per directed edge."""
    if _needs_simulator(plan):
        return _simulated(plan, _latencies(delays), costs, delays).makespan
    active = active_stages(plan, full_step(plan), samples=full_samples(plan))
    scheduler = ListScheduler(plan, active, *_known_costs(plan, costs), delays)
    return scheduler.replayed(_schedule(scheduler, False))


class Forecast(NamedTuple):
    """Seconds of a plan's step, and peak bytes of activations per rank."""

    seconds: float
    activation_peaks: tuple[int, ...]


def forecast(plan: Plan, transfers: Mapping[Edge, Transfer]) -> Forecast:
    """Forecast a step of :func:`full_program` for a plan with a profile, usually without creating
    the program. The results equal those of :func:`~raymm.scheduler.schedule.simulate.simulate` and
    :func:`.memory.activation_peaks`. The order of work does not depend on ``transfers``."""
    if _needs_simulator(plan):
        peaks = activation_peaks(full_program(plan), stage_costs(plan))
        return Forecast(_simulated(plan, transfers).makespan, peaks)
    active = active_stages(plan, full_step(plan), samples=full_samples(plan))
    costs, sizes = _known_costs(plan, None)
    scheduler = ListScheduler(plan, active, costs, sizes)
    schedule = _schedule(scheduler, False)
    return Forecast(
        scheduler.replayed(schedule, transfers, costs), scheduler.activation_peaks(schedule)
    )


def _needs_simulator(plan: Plan) -> bool:
    """Return True if only the simulator can time the plan: modules on quotas with surfaces, or
    slots."""
    return plan.schedule == SLOTS or group_seconds(plan) is not None and any(
        stage.quota is not None for stage in plan.stages
    )


def _simulated(
    plan: Plan, transfers: Mapping[Edge, Transfer],
    costs: Mapping[tuple[StageId, Op], float] | None = None,
    delays: Mapping[Edge, float] | None = None,
) -> Timeline:
    costs = _known_costs(plan, costs)[0]
    program = lower(plan, full_step(plan), costs, delays=delays, samples=full_samples(plan))
    return simulate(
        program, costs, transfers=transfers, group_seconds=group_seconds(plan, costs),
        posted=plan.posted_receives,
    )


def _latencies(delays: Mapping[Edge, float] | None) -> dict[Edge, Transfer]:
    return {edge: Transfer(0.0, seconds) for edge, seconds in (delays or {}).items()}


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
        return _zero_bubble(scheduler).schedule
    return scheduler.run(Rules())


def _replayed(scheduler: ListScheduler, schedule: Schedule) -> Schedule:
    return replace(schedule, makespan=scheduler.replayed(schedule))


class _PolicySchedule(NamedTuple):
    """Schedule with its program's time, and the policy that made it (None for 1F1B itself)."""

    schedule: Schedule
    policy: Policy | None


def _makespan(result: _PolicySchedule) -> float:
    return result.schedule.makespan


def _zero_bubble(scheduler: ListScheduler, rounds: int = 0) -> _PolicySchedule:
    """Return the best of several list schedules within 1F1B's activation memory, after ``rounds``
    rounds of local search if the plan has no policy.

    B_w is a separate task that fills the drain (Zero Bubble, Qi et al. 2024). A recomputation may
    start before its gradient arrives, which is the gain for frozen models, as they have no B_w.
    1F1B is among the candidates, so the result is never slower.
    """
    plan = scheduler.plan
    baseline = _replayed(scheduler, scheduler.run(Rules()))
    limits = plan.activation_limits or _limits(
        plan, scheduler.activation_peaks(baseline), scheduler.sizes
    )
    shared = any(len(plan.rank_stages(rank)) > 1 for rank in range(plan.num_ranks))
    recompute = any(stage.recompute for stage in plan.stages)
    tried = policies(shared, recompute) if plan.policy is None else (plan.policy,)
    schedules, stuck = [], None
    for policy in tried:
        try:
            schedules.append(_with_policy(scheduler, policy, limits))
        except NoPlanError as error:  # stages of one rank wait for each other
            stuck = error
    schedules.sort(key=_makespan)
    best = schedules[0] if schedules else None
    if rounds and plan.policy is None:
        for start in schedules[:TUNED_POLICIES]:
            tuned = _tuned(scheduler, start, limits, rounds // TUNED_POLICIES)
            best = min(best or tuned, tuned, key=_makespan)
    if plan.activation_limits is None and (
        best is None or baseline.makespan <= best.schedule.makespan
    ):
        return _PolicySchedule(baseline, None)
    if best is None:
        assert stuck is not None  # all policies failed
        raise stuck
    return best


def _with_policy(
    scheduler: ListScheduler, policy: Policy, limits: Sequence[float]
) -> _PolicySchedule:
    rules = Rules(policy, split=True, early_recompute=True, byte_limits=tuple(limits))
    return _PolicySchedule(_replayed(scheduler, scheduler.run(rules)), policy)


def _tuned(
    scheduler: ListScheduler, best: _PolicySchedule, limits: Sequence[float], rounds: int
) -> _PolicySchedule:
    """Search locally for better numbers of held microbatches: change them by one or two for some
    consecutive stages of a module, and keep changes that are not slower. Draws depend on the plan
    only, so that results are reproducible."""
    plan = scheduler.plan
    chosen = best.policy
    assert chosen is not None
    bound = lower_bound(plan, scheduler.delays, dict(enumerate(limits)))
    most, draws = plan.num_microbatches, random.Random(0)
    ahead = [
        [most if chosen.beyond_depth else min(most, plan.warm_up[s.id]) for s in stages]
        for stages in (plan.replicas(node.name)[0] for node in plan.graph.nodes)
    ]
    for _ in range(rounds):
        if best.schedule.makespan <= bound * CLOSE:
            break
        held = [list(module) for module in ahead]
        module = draws.choice(held)
        first = draws.randrange(len(module))
        last = draws.randint(first, len(module) - 1) if draws.random() < 0.5 else first
        change = draws.choice((-2, -1, 1, 2))
        for index in range(first, last + 1):
            module[index] = min(most, max(1, module[index] + change))
        policy = replace(chosen, ahead=tuple(map(tuple, held)))
        try:
            tried = _with_policy(scheduler, policy, limits)
        except NoPlanError:
            continue
        if tried.schedule.makespan <= best.schedule.makespan:
            best, ahead = tried, held
    return best


def refine(
    plan: Plan, delays: Mapping[Edge, float] | None = None
) -> tuple[Plan, float]:
    """Return a plan that lowers quickly, and its :func:`iteration_time`. A zero-bubble plan without
    policy gets the best policy of a local search, so that lowering it does not try several."""
    if plan.schedule == SLOTS:
        return plan, iteration_time(plan, delays=delays)
    active = active_stages(plan, full_step(plan), samples=full_samples(plan))
    scheduler = ListScheduler(plan, active, *_known_costs(plan, None), delays)
    if plan.schedule != "zero_bubble" or plan.policy is not None:
        return plan, scheduler.replayed(_schedule(scheduler, False))
    rounds = min(TUNING_ROUNDS, TUNED_TASKS // max(1, scheduler.num_tasks))
    schedule, policy = _zero_bubble(scheduler, rounds if plan.profile else 0)
    return plan if policy is None else replace(plan, policy=policy), schedule.makespan


def one_f_one_b_limits(
    plan: Plan, baseline: Program, sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    """Return the bytes of activations per rank that need no more memory than the plan's 1F1B
    program. Devices are equal, so the fullest rank counts (as in Zero Bubble): any rank may hold as
    much as the fullest rank of 1F1B, if weights and optimizer state leave room for it."""
    return _limits(plan, activation_peaks(baseline, sizes), sizes)


def _limits(
    plan: Plan, peaks: Sequence[int], sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    costs = [
        [sizes[s.id] for s in plan.rank_stages(rank) if s.id in sizes]
        for rank in range(plan.num_ranks)
    ]
    overheads = [beside_activations(cost) for cost in costs]
    device = max(p + b for p, b in zip(peaks, overheads, strict=True))
    # Temporary memory of a backward cannot be reduced by holding fewer microbatches.
    return tuple(
        max(peak, min(max(peaks), device - cost)) - max((c.remade_bytes for c in rank), default=0)
        for peak, cost, rank in zip(peaks, overheads, costs, strict=True)
    )
