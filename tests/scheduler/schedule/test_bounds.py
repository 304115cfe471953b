"""Lower bounds compared with simulated steps, and with obvious bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.bounds import lower_bound, one_f_one_b_bound
from raymm.scheduler.schedule.lower import full_program, one_f_one_b_limits
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.random_plans import profiled_plans

Delays = dict[tuple[str, str], float]


@st.composite
def delays_of(draw: st.DrawFn, plan: Plan) -> Delays:
    return {
        edge: draw(st.integers(0, 5))
        for src, dst in plan.stage_edges for edge in ((src, dst), (dst, src))
        if plan.by_id[src].rank != plan.by_id[dst].rank
    }


def simulated(plan: Plan, delays: Delays) -> float:
    program = full_program(plan, delays=delays)
    transfers = {edge: Transfer(0.0, seconds) for edge, seconds in delays.items()}
    return simulate(program, op_seconds(plan), transfers=transfers).makespan


@given(st.data())
def test_no_schedule_is_faster(data: st.DataObject) -> None:
    plan = data.draw(profiled_plans())
    delays = data.draw(delays_of(plan))
    bound = lower_bound(plan, delays)
    for schedule in SCHEDULES:
        assert bound <= simulated(replace(plan, schedule=schedule), delays) + 1e-6, schedule
    one = replace(plan, schedule="1f1b")
    assert bound <= one_f_one_b_bound(one, delays) <= simulated(one, delays) + 1e-6


def test_a_pipeline_that_waits_for_its_messages() -> None:
    """Use four stages of one second per pass, ten seconds from each other.

    The second may hold three microbatches, which take 46 seconds to the loss and back.
    """
    graph = ModuleGraph((ModuleNode("llm", (True,) * 4),), ())
    profile = CostProfile({"llm": (LayerCost(1.0, 0.5, 0.5),) * 4})
    stages = tuple(Stage("llm", i, (i, i + 1), i) for i in range(4))
    plan = Plan(graph, stages, 8, "1f1b", profile)
    delays = {edge: 10.0 for a, b in plan.stage_edges for edge in ((a, b), (b, a))}
    # 11 s until its first input arrives, a forward, three turns, and the first stage's backward.
    assert one_f_one_b_bound(plan, delays) == 11 + 1 + 3 * 46 + 10.5
    assert lower_bound(plan, delays) < one_f_one_b_bound(plan, delays)
    assert one_f_one_b_bound(plan, delays) <= simulated(plan, delays)


@given(st.data())
def test_no_schedule_within_limits_is_faster(data: st.DataObject) -> None:
    plan = replace(data.draw(profiled_plans()), schedule="zero_bubble")
    delays = data.draw(delays_of(plan))
    sizes = stage_costs(plan)
    if data.draw(st.booleans()):
        baseline = full_program(replace(plan, schedule="1f1b"), delays=delays)
        limits = one_f_one_b_limits(plan, baseline, sizes)
    else:
        limits = tuple(
            sum(sizes[s.id].activation_bytes + sizes[s.id].input_bytes
                for s in plan.rank_stages(rank)) + data.draw(st.integers(0, 60))
            for rank in range(plan.num_ranks)
        )
    plan = replace(plan, activation_limits=limits)
    try:
        seconds = simulated(plan, delays)
    except NoPlanError:
        assume(False)
    assert lower_bound(plan, delays, dict(enumerate(limits))) <= seconds + 1e-6
    assert lower_bound(plan, delays) <= lower_bound(plan, delays, dict(enumerate(limits)))


def slow_bounds(plan: Plan, delays: Delays) -> tuple[float, float]:
    """Return the busiest rank's work, and the longest path of one microbatch down to a loss.

    All paths are spelled out, including the work of that loss's stage.
    """
    costs = op_seconds(plan)
    active = active_stages(plan, full_step(plan))
    work = [0.0] * plan.num_ranks
    for one in active:
        for name in one.stages:
            stage = plan.by_id[name]
            work[stage.rank] += costs[name, Op.FORWARD]
            if name in one.needs_backward:
                work[stage.rank] += costs[name, Op.BACKWARD]
                work[stage.rank] += costs[name, Op.FORWARD] if stage.recompute else 0.0

    def ways(name: str, run: frozenset[str]) -> list[float]:
        """Return the seconds of every path from data to the end of a stage's forward."""
        before = [src for src in plan.stage_producers[name] if src in run]
        found = [
            seconds + delays.get((src, name), 0.0) for src in before for seconds in ways(src, run)
        ]
        return [seconds + costs[name, Op.FORWARD] for seconds in found or [0.0]]

    path = []
    for one in active:
        for loss in plan.stages:
            if loss.id not in one.stages or plan.stage_consumers[loss.id]:
                continue
            seconds = max(ways(loss.id, one.stages))
            if loss.id in one.needs_backward:
                seconds += costs[loss.id, Op.BACKWARD]
                seconds += costs[loss.id, Op.FORWARD] if loss.recompute else 0.0
            path.append(seconds)
    return max(work), max(path)


@given(st.data())
def test_at_least_the_obvious_bounds(data: st.DataObject) -> None:
    plan = data.draw(profiled_plans())
    delays = data.draw(delays_of(plan))
    bound = lower_bound(plan, delays)
    assert bound >= max(slow_bounds(plan, delays)) - 1e-9
    assert lower_bound(plan) <= bound
    # A replica's first microbatch may have a shorter way back than the others'.
    if all(len(plan.replicas(n.name)) <= plan.num_microbatches for n in plan.graph.nodes):
        more = replace(plan, num_microbatches=plan.num_microbatches + 1)
        assert bound <= lower_bound(more, delays)


def chain(ranks: int, microbatches: int, **layer: int) -> Plan:
    """Return a trained LLM with a layer per rank, F = B_d = B_w = 1 s."""
    cost = LayerCost(1, 1, 1, **layer)
    return Plan(
        ModuleGraph((ModuleNode("llm", (True,) * ranks),), ()),
        tuple(Stage("llm", i, (i, i + 1), i) for i in range(ranks)),
        microbatches, profile=CostProfile({"llm": (cost,) * ranks}),
    )


def test_spelled_out() -> None:
    # The last rank begins after 2 s, has 5 times 3 s of work; all 5 s of B_w may follow its last
    # gradient; from then on 1 + 1 s of the others' B_d (the first has only B_w).
    assert lower_bound(chain(3, 5)) == 2 + 15
    # One microbatch: 3 F, then B_d, B_d and the first stage's B_w.
    assert lower_bound(chain(3, 1)) == 3 + 2 + 1
    # With memory for a single microbatch each has been to the loss and back before the next begins.
    limits = {rank: 50.0 for rank in range(3)}
    assert lower_bound(chain(3, 5, activation_bytes=50), None, limits) == 5 * (3 + 2 + 1)
    # With memory for two on the last rank at most two of its B_w can wait.
    limits = {0: 250.0, 1: 250.0, 2: 100.0}
    assert lower_bound(chain(3, 5, activation_bytes=50), None, limits) == 2 + 13 + 1 + 1
    edges = [(StageId("llm", 0), StageId("llm", 1)), (StageId("llm", 1), StageId("llm", 2))]
    assert lower_bound(chain(3, 5), dict.fromkeys(edges, 10)) == 22 + 15


def test_tasks_without_memory_may_always_wait() -> None:
    """Use a profile without activations, for which limits have no effect."""
    nothing = {rank: 0 for rank in range(3)}
    assert lower_bound(chain(3, 5), None, nothing) == lower_bound(chain(3, 5))
    plan = replace(chain(3, 5), schedule="zero_bubble", activation_limits=(0, 0, 0))
    assert lower_bound(plan, None, nothing) <= simulated(plan, {}) + 1e-6
    plenty = {rank: math.inf for rank in range(3)}
    assert lower_bound(chain(3, 5, activation_bytes=50), None, plenty) == 17


def test_a_profile_is_needed() -> None:
    with pytest.raises(ValueError, match="no cost profile"):
        lower_bound(replace(chain(2, 2), profile=None))
