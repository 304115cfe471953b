"""Megatron MIMO: three phases on shared ranks, and an order without durations."""

from __future__ import annotations

from dataclasses import replace

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Op
from raymm.scheduler.schedule.lower import full_program
from tests.support.field_schedules import most_held, replicated_plan, stepped


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


def test_mimo_order_does_not_depend_on_durations() -> None:
    plans = [replicated_plan(8, "mimo", seconds) for seconds in (0.5, 8.0)]
    first, second = map(full_program, plans)
    assert first == second


def test_an_encoder_keeps_all_replicas_of_its_consumer_busy() -> None:
    """One encoder for two replicas of a pipeline, which overlap as with their own encoders."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * 2)), (("vision", "llm"),)
    )
    cost = LayerCost(1.0, 1.0, 1.0, 100, 100, 1)
    encoder = replace(cost, forward=0.1, backward_input=0.1, backward_weight=0.1)
    profile = CostProfile({"vision": (encoder,), "llm": (cost,) * 2})

    def seconds(replicas: int) -> float:
        stages = (
            Stage("vision", 0, (0, 1), 0),
            *(
                Stage("llm", index, (index, index + 1), 1 + 2 * replica + index, replica)
                for replica in range(replicas) for index in range(2)
            ),
        )
        return stepped(Plan(graph, stages, 8 * replicas, "mimo", profile)).seconds()

    assert seconds(2) < 1.05 * seconds(1)
