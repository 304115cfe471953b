"""Search for factors of encoders: it equals an evaluation of every factor."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.evaluation import evaluate
from raymm.scheduler.search.factor_search import search_factors, with_factor

GRAPH = ModuleGraph(
    (ModuleNode("a", (True,)), ModuleNode("llm", (True, True))), (("a", "llm"),)
)


def plan_of(
    seconds: float, fixed: float, microbatches: int, limit: int | None = None, trained: bool = True
) -> Plan:
    """Return a plan of an encoder and a language model of two stages, whose layers take a second
    each way."""
    layer = LayerCost(1.0, 1.0, 1.0, 100, 10, 10)
    first = replace(layer, **dict.fromkeys(
        ("forward", "backward_input", "backward_weight"), seconds
    ))
    profile = CostProfile({"a": (first,), "llm": (layer,) * 2}, fixed={"a": fixed})
    graph = replace(GRAPH, nodes=(ModuleNode("a", (trained,)), GRAPH.nodes[1]))
    stages = (
        Stage("a", 0, (0, 1), 0), Stage("llm", 0, (0, 1), 1), Stage("llm", 1, (1, 2), 2)
    )
    return Plan(graph, stages, microbatches, profile=profile, memory_limit=limit)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([0.1, 0.7, 1.5, 4.0]), st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([1, 3, 4, 8, 12]), st.sampled_from([None, 600, 1500]), st.booleans(),
)
def test_search_equals_all_factors(seconds, fixed, microbatches, limit, trained):
    network = Network()
    option, unfit = evaluate(plan_of(seconds, fixed, microbatches, limit, trained), network)
    every = [] if unfit else [option.seconds]
    for factor in (2, 4, 8):
        if microbatches % factor == 0:
            tried, unfit = evaluate(with_factor(option.plan, "a", factor), network)
            every += [] if unfit else [tried.seconds]
    found = search_factors(option, network, ["a"], SearchControl())
    assert found.seconds == min([option.seconds, *every])
    assert found.seconds == evaluate(found.plan, network)[0].seconds


def test_fixed_seconds_are_paid_once_per_group():
    plan = plan_of(8.0, 0.75, 8)
    for factor in (1, 2, 4, 8):
        cost = stage_costs(with_factor(plan, "a", factor))[plan.stages[0].id]
        assert factor * cost.forward == pytest.approx(6 + factor * 2)
        assert factor * cost.backward_weight == pytest.approx(6 + factor * 2)


def test_activations_of_a_group_limit_the_factor():
    """An encoder that only launches kernels gets a larger factor while memory allows."""
    network = Network()
    factors = []
    for limit in (None, 1500, 600):
        option, _ = evaluate(plan_of(4.0, 0.9, 8, limit), network)
        found = search_factors(option, network, ["a"], SearchControl())
        factors.append(found.plan.module_stages("a")[0].microbatch_factor)
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > factors[-1]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_fractions_outside_0_to_1_are_refused(fraction):
    with pytest.raises(PlanError, match="fixed of 'a'"):
        CostProfile({"a": (LayerCost(1.0, 1.0, 1.0),)}, fixed={"a": fraction})
