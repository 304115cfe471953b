"""Lowering: from a plan, and what a step's microbatches contain, to the step's program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

from raymm.scheduler.list_schedule import (
    ListScheduler,
    NoRoomError,
    Rules,
    Schedule,
    to_program,
)
from raymm.scheduler.memory import activation_peaks
from raymm.scheduler.plan import Plan
from raymm.scheduler.program import Op, Program
from raymm.scheduler.stage_costs import StageCost, op_seconds, stage_costs
from raymm.scheduler.step_graph import ActiveStages, active_stages

# What 1F1B does when it is free: a forward, as other ranks wait for it, while it may hold one
# more microbatch; else a backward, which makes room for one.
ONE_F_ONE_B = Rules(priority=(0, 1, 1, 2))

# Ways to fill idle time; which is best depends on the graph and its costs, so all are tried.
# The order is (forward, recompute, backward, weight); a weight gradient is never urgent.
_PRIORITIES = ((0, 1, 2, 3), (0, 1, 1, 3), (1, 2, 0, 3), (1, 1, 0, 3), (0, 0, 0, 1))
_PATIENCE = (0.0, 0.5, 1.0)
_HOPS = (2, 4, 1_000_000)
_BEYOND_DEPTH = (False, True)


def lower(
    plan: Plan,
    present: Sequence[Collection[str]],
    costs: Mapping[tuple[str, Op], float] | None = None,
    forward_only: bool = False,
    delays: Mapping[tuple[str, str], float] | None = None,
) -> Program:
    """Lower a plan to a program for one step, by the plan's schedule.

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
    return to_program(plan, active, _schedule(plan, active, costs, delays, forward_only))


def iteration_time(
    plan: Plan,
    costs: Mapping[tuple[str, Op], float] | None = None,
    delays: Mapping[tuple[str, str], float] | None = None,
) -> float:
    """Seconds of a step with every modality in every microbatch: what :func:`simulate` says
    of :func:`lower`'s program, without making one."""
    everything = [node.name for node in plan.graph.nodes]
    active = active_stages(plan, [everything] * plan.num_microbatches)
    return _schedule(plan, active, costs, delays, False).makespan


def _schedule(
    plan: Plan,
    active: Sequence[ActiveStages],
    costs: Mapping[tuple[str, Op], float] | None,
    delays: Mapping[tuple[str, str], float] | None,
    forward_only: bool,
) -> Schedule:
    sizes = stage_costs(plan) if plan.profile is not None else {}
    if costs is None:
        costs = op_seconds(plan) if plan.profile is not None else {}
    scheduler = ListScheduler(plan, active, costs, sizes, delays)
    if plan.schedule == "gpipe":
        return scheduler.run(Rules(ONE_F_ONE_B.priority, flush=True))
    if plan.schedule == "zero_bubble" and not forward_only:
        return _zero_bubble(plan, scheduler, plan.activation_limits)
    return scheduler.run(ONE_F_ONE_B)


def _zero_bubble(
    plan: Plan, scheduler: ListScheduler, limits: Sequence[int] | None
) -> Schedule:
    """The best of several list schedules within 1F1B's activation memory.

    B_w is a task of its own (Zero Bubble, Qi et al. 2024: it fills the drain), a
    recomputation may start before its gradient arrives (a frozen model has no B_w; this is
    where it gains), and 1F1B itself is among the candidates, so the result is never slower.
    """
    baseline = scheduler.run(ONE_F_ONE_B)
    best = baseline if limits is None else None
    limits = limits or one_f_one_b_limits(plan, baseline, scheduler.sizes)
    shared = any(len(plan.rank_stages(rank)) > 1 for rank in range(plan.num_ranks))
    hops_tried = _HOPS if shared else _HOPS[-1:]
    for priority, patience, hops, beyond_depth in product(
        _PRIORITIES, _PATIENCE, hops_tried, _BEYOND_DEPTH
    ):
        rules = Rules(priority, patience, make_room=True, split=True, early_recompute=True,
                      byte_limits=tuple(limits), beyond_depth=beyond_depth, hops=hops)
        try:
            found = scheduler.run(rules)
        except NoRoomError as error:  # where stages of one rank wait for each other
            stuck = error
            continue
        if best is None or found.makespan < best.makespan:
            best = found
    if best is None:
        raise stuck
    return best


def one_f_one_b_limits(
    plan: Plan, baseline: Schedule | Program, sizes: Mapping[str, StageCost]
) -> tuple[int, ...]:
    """Bytes of activations per rank that cost no more memory than 1F1B does.

    Devices are alike, so what counts is the rank that needs most (as Zero Bubble counts its
    memory): any rank may hold as much as 1F1B's fullest does, as long as weights and
    optimizer state leave room for it.
    """
    peaks = activation_peaks(plan, baseline, sizes)
    state = [
        sum(sizes[s.name].state_bytes for s in plan.rank_stages(rank) if s.name in sizes)
        for rank in range(plan.num_ranks)
    ]
    device = max(p + s for p, s in zip(peaks, state, strict=True))
    return tuple(
        max(peak, min(max(peaks), device - own)) for peak, own in zip(peaks, state, strict=True)
    )


def lower_1f1b(
    plan: Plan,
    present: Sequence[Collection[str]],
    costs: Mapping[tuple[str, Op], float] | None = None,
    forward_only: bool = False,
) -> Program:
    """1F1B on a DAG, whatever the plan's schedule says; arguments as of :func:`lower`.

    A stage's warm-up depth is its longest path to the loss (Cornstarch v1 §4.1, Fig. 6).
    Each rank runs, whenever it is free, the ready forward of the oldest microbatch (of two
    stages the one nearest to the loss), else the ready backward of the oldest, and never
    holds more microbatches of a stage than the stage's depth. On a chain with one stage per
    rank and equal costs this is textbook 1F1B. Forwards go first because other ranks wait for
    them; on a rank that several stages share, backwards first would drain the pipeline after
    it.
    """
    active = active_stages(plan, present, forward_only)
    scheduler = ListScheduler(plan, active, costs or {})
    return to_program(plan, active, scheduler.run(ONE_F_ONE_B))
