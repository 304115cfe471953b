"""Kept activations and stage cuts together, compared with brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, trainable_before
from raymm.scheduler.costs.recomputation import OPTIONS, LayerOption
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search import planner
from raymm.scheduler.search.evaluation import Option, evaluate
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import find_plans, propose, within_memory
from raymm.scheduler.search.stage_space import StageSpace

GRAPH_MODULES = ("vision", "llm")


@st.composite
def layers(draw: st.DrawFn, trainable: bool = True) -> LayerCost:
    kept = draw(st.integers(0, 12))
    options = tuple(
        LayerOption(
            name, float(draw(st.integers(0, 6))), draw(st.integers(0, kept)),
            draw(st.none() | st.integers(0, 24)),
        )
        for name in draw(st.lists(st.sampled_from(OPTIONS[1:]), max_size=2, unique=True))
    )
    return LayerCost(
        float(draw(st.integers(1, 5))), float(draw(st.integers(0, 5))),
        float(draw(st.integers(0, 5))), kept, draw(st.integers(0, 2)), draw(st.integers(0, 3)),
        options=options,
    )


@st.composite
def tight_spaces(draw: st.DrawFn) -> StageSpace:
    """Draw an encoder and a language model of up to 4 layers, and a relevant limit."""
    nodes, modules = [], {}
    for name, most in zip(GRAPH_MODULES, (2, 4), strict=True):
        many = draw(st.integers(1, most))
        frozen = draw(st.integers(0, many)) if name == "vision" else 0
        nodes.append(ModuleNode(name, (False,) * frozen + (True,) * (many - frozen)))
        modules[name] = tuple(draw(layers()) for _ in range(many))
    graph = ModuleGraph(tuple(nodes), (GRAPH_MODULES,))
    return StageSpace(
        graph, CostProfile(modules), draw(st.integers(2, 6)), draw(st.integers(1, 4)),
        memory_limit=draw(st.integers(8, 120)),
    )


def beside(space: StageSpace, module: str, lo: int, hi: int, live: int) -> int:
    """Return the bytes of a stage's messages, and of outputs that wait for their backward.

    Four of each incoming message are posted, and four of each outgoing one are in flight.
    """
    posted = min(4, space.num_microbatches)
    costs, backward = space.profile.modules[module], space.backward[module][hi - 1]
    received = costs[lo - 1].output_bytes if lo else sum(
        space.profile.modules[name][-1].output_bytes for name in space.graph.producers(module)
    )
    sink = module == "llm" and hi == len(costs)
    handed = 0 if sink else costs[hi - 1].output_bytes
    returned = received if trainable_before(space.graph)[module][lo] else 0
    if not backward:  # a forward first holds its input, then its output
        return (posted + 1) * received + 4 * handed
    return posted * (received + handed) + 4 * returned + live * handed


def least_added(space: StageSpace, module: str, lo: int, hi: int, live: int) -> float:
    """Return the least added seconds of all choices for a stage's layers."""
    node, costs = space.graph.node(module), space.profile.modules[module]
    state = sum(space.profile.state_bytes(costs[i], node.trainable[i]) for i in range(lo, hi))
    own = [costs[i] for i in range(lo, hi) if space.backward[module][i]]
    best = math.inf
    for chosen in itertools.product(*(cost.choices for cost in own)):
        held = live * sum(one.nbytes for one in chosen) + beside(space, module, lo, hi, live)
        remade = max(
            (
                (c.activation_bytes - one.nbytes) * (2 if one.name == "offload" else 1)
                if one.working_bytes is None else one.working_bytes
                for c, one in zip(own, chosen, strict=True)
            ),
            default=0,
        )
        if state + held + remade <= space.memory_limit:
            best = min(best, sum(one.seconds for one in chosen))
    return best


@given(tight_spaces())
def test_cuts_and_choices_are_the_best_together(space: StageSpace) -> None:
    fitting = within_memory(space, adaptive=True)
    for module in GRAPH_MODULES:
        many = space.graph.node(module).num_layers
        seconds = space.stage_seconds(module)
        for stages, beyond in itertools.product(range(1, many + 1), (0, 1)):
            bottlenecks = []
            for cuts in itertools.combinations(range(1, many), stages - 1):
                bounds = (0, *cuts, many)
                bottlenecks.append(max(
                    seconds[lo, hi] + least_added(
                        space, module, lo, hi,
                        min(stages - index + beyond, space.num_microbatches),
                    )
                    for index, (lo, hi) in enumerate(itertools.pairwise(bounds))
                ))
            ranges = fitting.partition(module, stages, beyond)
            if ranges is None:
                assert min(bottlenecks) == math.inf
                continue
            added = fitting.memory.added(module, stages, beyond)
            found = max(seconds[r] + added[i][r] for i, r in enumerate(ranges))
            assert found == pytest.approx(min(bottlenecks))


@given(tight_spaces(), st.data())
def test_a_plan_has_layer_options_and_fits(space: StageSpace, data: st.DataObject) -> None:
    fitting = within_memory(space, adaptive=True)
    try:
        counts = data.draw(st.sampled_from(list(fitting.combinations()) or [None]))
        plan = fitting.plan(counts) if counts else None
    except NoPlanError:
        plan = None
    if plan is None:
        return
    option, unfit = evaluate(plan, Network())
    assert unfit is None and max(one.total for one in option.memory) <= space.memory_limit
    assert Plan.from_json(plan.to_json()) == plan
    free = replace(plan, stages=tuple(replace(s, layer_options=()) for s in plan.stages))
    more, before = op_seconds(plan), op_seconds(free)
    for stage in plan.stages:
        added = more[stage.id, Op.BACKWARD] - before[stage.id, Op.BACKWARD]
        live = min(plan.depth[stage.id], space.num_microbatches)
        assert added == pytest.approx(least_added(space, stage.module, *stage.layers, live))
        assert bool(stage.layer_options) or added == 0


def chain(many: int, options: tuple[LayerOption, ...]) -> tuple[ModuleGraph, CostProfile]:
    graph = ModuleGraph((ModuleNode("llm", (True,) * many),), ())
    cost = LayerCost(1.0, 1.0, 1.0, 100, 10, 0, options=options)
    return graph, CostProfile({"llm": (cost,) * many})


def test_the_planner_keeps_activations_that_fit() -> None:
    """Check that the first stages recompute a little, instead of full recomputation or uneven cuts.
    """
    options = (LayerOption("matmuls", 0.1, 60), LayerOption("all", 1.0, 10))
    graph, profile = chain(16, options)
    only = {"layouts": ("modality_parallel",), "schedules": ("1f1b",)}

    def best(limit: int, recompute: bool | str | None) -> Option:
        problem = PlanProblem(graph, profile, 4, 16, limit, recompute=recompute, **only)
        return find_plans(problem).best

    free = best(10**6, None)
    assert not any(stage.layer_options for stage in free.plan.stages)
    uneven, layers, again = best(1100, False), best(1100, "layers"), best(1100, True)
    assert layers.seconds < 1.03 * free.seconds
    assert uneven.seconds > 1.3 * free.seconds and again.seconds > 1.3 * free.seconds
    assert best(1100, None).plan == layers.plan and "layers recomputing" in layers.label
    first, last = layers.plan.stages[0], layers.plan.stages[-1]
    assert "keep" not in first.layer_options and not last.layer_options
    with pytest.raises(NoPlanError):
        best(1000, False)
    assert best(1000, None).seconds < 0.85 * best(1000, True).seconds


@pytest.mark.cells(1)
@pytest.mark.parametrize("limit", [900, 1000, 1100, 1300])
def test_nothing_is_searched_twice(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Use tight memory: a second search has only the remaining candidates, and finds none better.
    """
    graph, profile = chain(16, (LayerOption("all", 1.0, 10),))
    problem = PlanProblem(graph, profile, 4, 16, limit)
    searched = []
    run = planner._Planner.run

    def noting(self: planner._Planner) -> tuple[str, ...]:
        searched.extend((layout, self._memory_text) for layout in self.layouts)
        return run(self)

    monkeypatch.setattr(planner._Planner, "run", noting)
    found = find_plans(problem)
    assert len(set(searched)) == len(searched) and len(found.searched) == len(searched)
    every = [propose(replace(problem, recompute=again)) for again in ("layers", True)]
    assert found.best.seconds <= min(one.best.seconds for one in every)
    plans = [(option.label, option.plan) for option in found.options]
    assert len({label for label, _ in plans}) == len(plans)


def test_cuts_account_for_recomputation() -> None:
    """Use little memory: even stages are not the best, as later ones hold fewer microbatches."""
    graph, profile = chain(16, (LayerOption("all", 1.0, 10),))
    only = {"layouts": ("modality_parallel",), "schedules": ("1f1b",)}
    found = propose(PlanProblem(
        graph, profile, 4, 16, memory_limit=800, recompute="layers", **only
    )).best
    assert [s.layers[1] - s.layers[0] for s in found.plan.stages] == [4, 4, 3, 5]


def test_options_are_part_of_a_profile() -> None:
    graph, profile = chain(2, (LayerOption("all", 1.0, 10),))
    assert CostProfile.from_json(profile.to_json()) == profile
    data = profile.to_dict()
    data["modules"]["llm"][0]["options"] = [["nothing", 1.0, 10]]
    with pytest.raises(ValueError, match="'nothing'; accepted: matmuls"):
        CostProfile.from_dict(data)
    data["modules"]["llm"][0]["options"] = [["all", -1.0, 10]]
    with pytest.raises(ValueError, match="seconds of 'all' is -1.0"):
        CostProfile.from_dict(data)
