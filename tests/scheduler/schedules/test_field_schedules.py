"""Schedules of other projects: what distinguishes each, and loads of single microbatches.

The oracles of tests/scheduler/program/test_issue_order.py (no deadlock under NCCL) and
tests/scheduler/schedule/test_lower.py (every task once) cover them as they cover 1F1B.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Op
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from raymm.scheduler.schedules.entrain import Entrain
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.random_plans import contents, profiled_plans

FIELD = ("megatron", "mimo", "mimo_colocated", "entrain", "dip", "bigmac", "optimus")
RANKS = 4


def replicated_plan(microbatches: int, schedule: str, encoder_seconds: float = 1.0) -> Plan:
    """Return a language model on four ranks, each with a replica of an encoder."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * RANKS)), (("vision", "llm"),)
    )
    profile = CostProfile({
        "vision": (LayerCost(encoder_seconds, encoder_seconds, encoder_seconds, 1000, 1),),
        "llm": (LayerCost(2.0, 2.0, 2.0, 100, 1),) * RANKS,
    })
    stages = [Stage("vision", 0, (0, 1), rank, replica=rank) for rank in range(RANKS)]
    stages += [Stage("llm", i, (i, i + 1), i) for i in range(RANKS)]
    return Plan(graph, tuple(stages), microbatches, schedule, profile)


def most_held(plan: Plan, module: str) -> int:
    report = check_program(full_program(plan))
    return max(
        held for stage, held in report.live_activations.items() if stage.module == module
    )


def stepped(plan: Plan, present=None, loads=None) -> PlannedStep:
    active = active_stages(plan, full_step(plan) if present is None else present)
    return PlannedStep(plan, active, loads=loads)


def test_field_schedules_are_registered() -> None:
    assert set(FIELD) < set(SCHEDULES)


@given(st.data(), st.sampled_from(SCHEDULES))
def test_loads_take_the_seconds_that_the_simulator_finds(data, schedule: str) -> None:
    plan = replace(data.draw(profiled_plans()), schedule=schedule)
    present = data.draw(contents(plan))
    loads = {
        node.name: [data.draw(st.integers(0, 4)) / 2 for _ in present] for node in plan.graph.nodes
    }
    step = stepped(plan, present, loads)
    check_program(step.program)
    costs = {
        (stage, op, number): seconds * loads[stage.module][number]
        for (stage, op), seconds in op_seconds(plan).items() for number in range(len(present))
    }
    timeline = simulate(
        step.program, {}, microbatch_costs=costs, posted=plan.posted_receives
    )
    assert step.seconds() == pytest.approx(timeline.makespan, abs=1e-6)


@given(st.data(), st.sampled_from(FIELD))
def test_memory_stays_within_the_limits(data, schedule: str) -> None:
    """Give each rank the memory of 1F1B, or half of it."""
    plan = data.draw(profiled_plans())
    present = data.draw(contents(plan))
    sizes = stage_costs(plan)
    peaks = activation_peaks(lower(replace(plan, schedule="1f1b"), present), sizes)
    share = data.draw(st.sampled_from([1.0, 0.5]))
    limits = tuple(int(peak * share) for peak in peaks)
    limited = replace(plan, schedule=schedule, activation_limits=limits)
    try:
        program = lower(limited, present)
    except NoPlanError:
        return
    check_program(program)
    for rank, peak in enumerate(activation_peaks(program, sizes)):
        temporary = max(sizes[stage.id].remade_bytes for stage in plan.rank_stages(rank))
        assert peak - temporary <= limits[rank]


def test_bigmac_holds_as_many_encoder_activations_for_any_batch() -> None:
    held = [most_held(replicated_plan(count, "bigmac"), "vision") for count in (16, 64)]
    assert held == [2, 2]
    assert [most_held(replicated_plan(n, "mimo_colocated"), "vision") for n in (16, 64)] == [4, 16]
    bytes_held = [
        max(stepped(replicated_plan(count, "bigmac")).peaks()) for count in (16, 64)
    ]
    assert bytes_held[0] == bytes_held[1]


def test_mimo_colocated_runs_three_phases() -> None:
    for rank in full_program(replicated_plan(8, "mimo_colocated")):
        computed = [
            (i.stage.module, i.op) for i in rank if i.op in FORWARDS or i.op in BACKWARDS
        ]
        assert computed[:2] == [("vision", Op.FORWARD)] * 2
        assert computed[-2:] == [("vision", Op.BACKWARD)] * 2
        assert {module for module, _ in computed[2:-2]} == {"llm"}


def test_mimo_colocated_divides_a_step_that_does_not_fit() -> None:
    plan = replicated_plan(16, "mimo_colocated")
    limits = tuple(peak // 2 for peak in stepped(plan).peaks())
    limited = replace(plan, activation_limits=limits)
    assert most_held(limited, "vision") <= most_held(plan, "vision") // 2
    assert stepped(limited).seconds() > stepped(plan).seconds()


def test_orders_without_durations_ignore_them() -> None:
    for schedule, ignores in (("megatron", True), ("mimo", True), ("dip", False)):
        plans = [replicated_plan(8, schedule, seconds) for seconds in (0.5, 8.0)]
        first, second = map(full_program, plans)
        assert (first == second) is ignores


def test_entrain_defers_excess_work_only_if_there_is_some() -> None:
    plan = replicated_plan(12, "entrain")
    uneven = stepped(plan, loads={"vision": [4.0, 0.5, 0.5, 0.5] * 3})
    vision, llm = plan.module_stages("vision")[0].id, plan.module_stages("llm")[0].id
    for step, deferred in ((stepped(plan), 0), (uneven, 2)):  # two microbatches of mean work
        ahead = Entrain().task_order(step).ahead
        assert ahead[vision] == plan.warm_up[vision] + deferred
        assert ahead[llm] == plan.warm_up[llm]
    slow = stepped(replace(plan, schedule="megatron"), loads=uneven.loads)
    assert uneven.seconds() < slow.seconds()


def test_optimus_runs_encoders_in_bubbles_only() -> None:
    """The language model takes as long as alone, from its first input to its last gradient."""
    plan = replicated_plan(16, "optimus", encoder_seconds=0.25)
    alone = stepped(replicated_plan(16, "1f1b", encoder_seconds=0.0)).seconds()
    assert alone <= stepped(plan).seconds() <= alone + 2.0
