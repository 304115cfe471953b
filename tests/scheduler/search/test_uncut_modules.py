"""Modules planned as one layer cost as much as their layers, and plans return to layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.schedule.lower import iteration_time
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import propose, time_shared_plans
from raymm.scheduler.search.stage_space import StageSpace
from raymm.scheduler.search.uncut_modules import in_own_layers, with_uncut_modules


@st.composite
def models(draw):
    """Draw an encoder with projector and a language model, any layers frozen, any costs."""
    def flags(count):
        return tuple(draw(st.booleans()) for _ in range(count))

    nodes = (
        ModuleNode("vision", flags(draw(st.integers(2, 5))), projector=True),
        ModuleNode("llm", flags(draw(st.integers(2, 5)))),
    )
    number = st.integers(1, 50)
    modules = {
        node.name: tuple(
            LayerCost(*(draw(number) for _ in range(3)), *(draw(number) for _ in range(3)))
            for _ in node.trainable
        )
        for node in nodes
    }
    return ModuleGraph(nodes, (("vision", "llm"),)), CostProfile(modules)


@given(models(), st.sets(st.sampled_from(["vision", "llm"]), min_size=1))
def test_an_uncut_module_costs_as_much_as_its_blocks(model, whole):
    graph, profile = model
    merged_graph, merged = with_uncut_modules(graph, profile, whole)
    before, after = layer_work(graph, profile), layer_work(merged_graph, merged)
    for name in ("vision", "llm"):
        for part in ("forward", "backward"):
            assert sum(getattr(w, part) for w in before[name]) == pytest.approx(
                sum(getattr(w, part) for w in after[name])
            )
    for name in whole:
        assert merged_graph.node(name).num_blocks == 1
        assert merged_graph.node(name).projector == graph.node(name).projector
    found = propose(PlanProblem(
        merged_graph, merged, 4, 3, layouts=("modality_parallel",)
    )).best.plan
    plan = in_own_layers(found, graph, profile)  # a Plan checks that all layers are covered
    for name in whole:
        assert plan.module_stages(name)[0].layers[1] >= graph.node(name).num_blocks
    mine, theirs = stage_costs(plan), stage_costs(found)
    for stage in plan.stages:
        assert mine[stage.id].forward == pytest.approx(theirs[stage.id].forward)
        assert mine[stage.id].activation_bytes == theirs[stage.id].activation_bytes
        assert mine[stage.id].state_bytes == pytest.approx(theirs[stage.id].state_bytes, abs=4)


@given(models(), st.integers(1, 2), st.integers(1, 5))
def test_few_ranks_hold_everything(model, ranks, microbatches):
    graph, profile = model
    space = StageSpace(graph, profile, 2, microbatches)
    found = dict(time_shared_plans(space, ranks))
    assert found
    work = sum(w.total for layers in layer_work(graph, profile).values() for w in layers)
    for name, plan in found.items():
        assert plan.num_ranks <= ranks, name
        assert iteration_time(plan) >= microbatches * work / ranks * (1 - 1e-9)
    if ranks == 1:
        assert iteration_time(found["everything on one rank"]) == pytest.approx(
            microbatches * work
        )


def test_the_first_rank_takes_fewer_layers_of_the_language_model():
    """Use an encoder of 4, and a language model of six layers of 2: 4 + 2 * 2 and 4 * 2."""
    layer = LayerCost(2.0, 0.0, 0.0)
    graph = ModuleGraph(
        (ModuleNode("vision", (False,)), ModuleNode("llm", (False,) * 5 + (True,))),
        (("vision", "llm"),),
    )
    profile = CostProfile({"vision": (LayerCost(4.0, 0.0, 0.0),), "llm": (layer,) * 6})
    plans = dict(time_shared_plans(StageSpace(graph, profile, 2, 4), 2))
    plan = plans["encoders share a rank"]
    assert [s.layers for s in plan.module_stages("llm")] == [(0, 2), (2, 6)]
    assert [s.rank for s in plan.stages] == [0, 0, 1]
