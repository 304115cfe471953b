"""Layouts that a person would write are never predicted to be faster than the plan found."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Proposal, evaluate
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.options import SEARCHED_SCHEDULES, PlanProblem
from raymm.scheduler.search.partition import Ranges, even_layers
from raymm.scheduler.search.planner import find_plans

TOLERANCE = 0.01
NODE = Network(Link(1e-4, 1e4), Link(1e-3, 1e3), 8)


def layer(seconds: float, parameters: int = 100) -> LayerCost:
    """Layer whose B_d and B_w each take as long as its forward."""
    return LayerCost(seconds, seconds, seconds, 40, parameters, 4)


def model_of(
    encoders: dict[str, tuple[float, int, bool]], llm_layers: int, head: float = 0.0
) -> tuple[ModuleGraph, CostProfile]:
    """Return encoders that feed a trained language model, with trained projectors.

    Args:
        encoders: seconds of a layer, number of layers, and True if they are trained.
        head: seconds that the last layer of the language model takes in addition.
    """
    nodes = [
        ModuleNode(name, (trained,) * size + (True,), projector=True)
        for name, (_, size, trained) in encoders.items()
    ]
    nodes.append(ModuleNode("llm", (True,) * llm_layers))
    modules = {
        name: (*[layer(seconds)] * size, layer(0.01))
        for name, (seconds, size, _) in encoders.items()
    }
    modules["llm"] = (*[layer(1.0)] * (llm_layers - 1), layer(1.0 + head))
    graph = ModuleGraph(tuple(nodes), tuple((name, "llm") for name in encoders))
    return graph, CostProfile(modules, links=NODE.links)


def found(graph: ModuleGraph, profile: CostProfile, ranks: int, microbatches: int) -> Proposal:
    powers = tuple(1 << n for n in range(ranks.bit_length()) if microbatches % (1 << n) == 0)
    choices = dict.fromkeys((n.name for n in graph.nodes), DegreeChoices((1,), (1,), powers))
    return find_plans(PlanProblem(
        graph, profile, ranks, microbatches, None, NODE, degrees=choices, recompute=False,
    ))


def hand_seconds(plan: Plan) -> float:
    """Return the predicted seconds of a plan; infinity if it does not fit."""
    option, reason = evaluate(plan, NODE, "by hand")
    return option.seconds if reason is None else float("inf")


def cut(layers: int, stages: int, draw: st.DrawFn) -> Ranges:
    """Draw equally many layers per stage, or any number."""
    if stages == 1 or draw(st.booleans()):
        return even_layers(layers, stages)
    inner = st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)
    return tuple(itertools.pairwise([0, *sorted(draw(inner)), layers]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModuleGraph, CostProfile, int, list[Plan]]:
    """Draw a model, a number of devices, and valid plans for them. Memory is unlimited: within
    a tight one, unequal stages of an encoder can be a few percent faster under zero bubble."""
    encoders = {
        name: (draw(st.sampled_from([0.1, 0.3, 1.0])), draw(st.integers(2, 4)), draw(st.booleans()))
        for name in ("vision", "audio")[: draw(st.integers(1, 2))]
    }
    graph, profile = model_of(
        encoders, draw(st.integers(3, 8)), draw(st.sampled_from([0.0, 0.5, 1.5]))
    )
    ranks, microbatches = draw(st.sampled_from([4, 6, 8])), draw(st.sampled_from([8, 16, 32]))
    plans = [_drawn(draw, graph, profile, ranks, microbatches) for _ in range(8)]
    return graph, profile, ranks, plans


def _drawn(
    draw: st.DrawFn, graph: ModuleGraph, profile: CostProfile, ranks: int, microbatches: int
) -> Plan:
    """Draw equal pipelines with encoders on separate ranks or next to stages. Each has twice as
    many microbatches as stages of the language model: with fewer, it can be faster not to balance
    the stages, which the search does not try."""
    dp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= ranks]))
    room = ranks // dp
    stages: list[Stage] = []
    encoders = [node for node in graph.nodes if node.name != "llm"]
    most = min(room, graph.node("llm").num_layers, microbatches // dp // 2)
    of_llm = draw(st.integers(1, most))
    first = of_llm
    for node in encoders:
        own = draw(st.integers(0, min(room - first, node.num_layers)))
        if own:
            stages += [
                Stage(node.name, at, layers, first + at)
                for at, layers in enumerate(cut(node.num_layers, own, draw))
            ]
            first += own
            continue
        start = draw(st.integers(0, of_llm - 1))
        copies = draw(st.integers(1, min(of_llm - start, microbatches // dp)))
        stages += [
            Stage(node.name, 0, (0, node.num_layers), start + copy, copy) for copy in range(copies)
        ]
    stages += [
        Stage("llm", at, layers, at)
        for at, layers in enumerate(cut(graph.node("llm").num_layers, of_llm, draw))
    ]
    schedule = draw(st.sampled_from(SEARCHED_SCHEDULES))
    plan = Plan(
        graph, tuple(stages), microbatches // dp, schedule, profile
    )
    return EqualPart.of(plan, dp).whole() if dp > 1 else plan


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_no_hand_layout_beats_the_plan(case) -> None:
    graph, profile, ranks, plans = case
    seconds = {hand_seconds(plan): plan for plan in plans}
    best = found(graph, profile, ranks, plans[0].num_microbatches).best
    least = min(seconds)
    assert least >= best.seconds * (1 - TOLERANCE), (best.label, least, seconds[least].stages)


def by_hand(
    model: tuple[ModuleGraph, CostProfile], llm: list[int], window: range, microbatches: int,
    schedule: str, dp: int = 1,
) -> Plan:
    """Return ``dp`` pipelines with the given layers per stage of the language model, and replicas
    of every encoder on a window of each pipeline's ranks."""
    graph, profile = model
    ranges = itertools.pairwise([0, *itertools.accumulate(llm)])
    stages = [
        Stage(node.name, 0, (0, node.num_layers), rank, replica)
        for node in graph.nodes if node.name != "llm" for replica, rank in enumerate(window)
    ]
    stages += [Stage("llm", at, layers, at) for at, layers in enumerate(ranges)]
    plan = Plan(graph, tuple(stages), microbatches // dp, schedule, profile)
    return EqualPart.of(plan, dp).whole() if dp > 1 else plan


@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_finds_an_encoder_on_the_first_rank_of_uneven_stages(schedule: str) -> None:
    model = model_of({"vision": (0.75, 4, False)}, 7)
    plan = by_hand(model, [1, 2, 2, 2], range(1), 8, schedule)
    assert found(*model, 4, 8).best.seconds <= hand_seconds(plan) * (1 + 1e-9)


@pytest.mark.cells(1)
@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_finds_replicas_of_pipelines_that_share_ranks(schedule: str) -> None:
    model = model_of({"vision": (0.3, 4, False)}, 16)
    plan = by_hand(model, [2] * 8, range(8), 128, schedule, dp=8)
    assert found(*model, 64, 128).best.seconds <= hand_seconds(plan) * (1 + 1e-9)


def test_a_layout_is_slower_or_does_not_fit_when_refused() -> None:
    """Layouts that were only skipped because a faster plan is known do not say that none fits."""
    model = model_of({"vision": (0.3, 4, False)}, 16)
    for layout, reason in found(*model, 64, 128).refused:
        assert "fits in memory; give it more" not in reason, layout
