"""Every reported number of seconds is the simulator's, including messages.

Receives are those that the executor posts on the plan's device, and no schedule is slower than
1F1B.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import (
    MESSAGE_BOUND,
    ModuleGraph,
    ModuleNode,
    posted_receives,
)
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.schedule.lower import forecast, full_program, iteration_time, refine
from raymm.scheduler.schedule.network import Network, Transfer
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search.evaluation import evaluate, step_timeline
from tests.scheduler.multiplex.test_mapped_plan import mapped_plan
from tests.support.random_mappings import cases
from tests.support.random_plans import profiled_plans

NETWORK = Network(Link(0.125, 8.0), Link(0.5, 2.0), 3)
GPU = "H100"
SCHEDULES = "1f1b", "gpipe", "zero_bubble"
WHOLE = st.integers(1, 9)  # seconds and bytes, so that sums are exact; every task takes time
LAYERS = st.builds(LayerCost, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)


def assert_simulated(plan: Plan) -> None:
    """Compare all reported figures of a plan with the simulator."""
    delays = NETWORK.delays(plan)
    latencies = {edge: Transfer(0.0, seconds) for edge, seconds in delays.items()}
    settled, seconds = refine(plan, delays)
    program = full_program(settled, delays=delays)
    # The executor posts receives ahead on a CPU, and one at a time on a GPU.
    posted = posted_receives(in_order=plan.profile.device == GPU)
    simulated = simulate(
        program, op_seconds(settled), transfers=latencies, posted=posted
    ).makespan
    assert seconds == iteration_time(settled, delays=delays) == simulated
    option, _ = evaluate(plan, NETWORK)
    assert option.seconds == step_timeline(option.plan, NETWORK).makespan
    assert option.seconds == simulate(
        full_program(option.plan), op_seconds(option.plan), transfers=NETWORK.transfers(plan),
        posted=posted,
    ).makespan
    assert option.seconds == forecast(option.plan, NETWORK.transfers(plan)).seconds


@settings(deadline=None)
@given(
    profiled_plans(LAYERS), st.integers(1, 3 * MESSAGE_BOUND), st.sampled_from(["cpu", GPU])
)
def test_pipelines(plan: Plan, microbatches: int, device: str) -> None:
    seconds = {}
    plan = replace(plan, profile=replace(plan.profile, device=device))
    for schedule in SCHEDULES:
        tried = replace(plan, schedule=schedule, num_microbatches=microbatches)
        assert_simulated(tried)
        settled, seconds[schedule] = refine(tried)
        program = full_program(settled)
        posted = posted_receives(in_order=device == GPU)
        simulated = simulate(program, op_seconds(settled), posted=posted).makespan
        assert seconds[schedule] == simulated
    assert seconds["zero_bubble"] <= seconds["1f1b"]


@settings(deadline=None)
@given(cases(), st.data())
def test_slots(case, data: st.DataObject) -> None:
    graph, mapping, _ = case
    plan = mapped_plan(graph, mapping, 2)
    profile = {
        node.name: tuple(data.draw(LAYERS) for _ in range(node.num_layers))
        for node in plan.graph.nodes
    }
    plan = replace(plan, profile=CostProfile(profile))
    posted = posted_receives(in_order=False)
    simulated = simulate(full_program(plan), op_seconds(plan), posted=posted).makespan
    assert iteration_time(plan) == simulated == refine(plan)[1]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_pile_up_delay_their_sender(schedule: str, device: str) -> None:
    """Let a frozen stage run ahead until too many of its messages are in flight."""
    graph = ModuleGraph(
        (
            ModuleNode("e0", (True,)), ModuleNode("e1", (True,)), ModuleNode("e2", (False, True)),
            ModuleNode("llm", (True,)),
        ),
        (("e0", "llm"), ("e1", "llm"), ("e2", "llm")),
    )
    stages = (
        Stage("e0", 0, (0, 1), 0), Stage("e1", 0, (0, 1), 1), Stage("e2", 0, (0, 1), 2),
        Stage("e2", 1, (1, 2), 3), Stage("llm", 0, (0, 1), 4),
    )
    layers = {
        "e0": (LayerCost(3.24, 0.94, 0.84, 289_000, 3000, 3000),),
        "e1": (LayerCost(1.55, 0.78, 0.65, 314_000, 4000, 3000),),
        "e2": (
            LayerCost(1.79, 0, 0, 309_000, 10_000, 4000),
            LayerCost(0.81, 0.69, 0.57, 171_000, 3000, 3000),
        ),
        "llm": (LayerCost(0.91, 1.1, 0.87, 104_000, 1000, 1000),),
    }
    plan = Plan(graph, stages, 2 * MESSAGE_BOUND, schedule, CostProfile(layers, device))
    assert_simulated(plan)
