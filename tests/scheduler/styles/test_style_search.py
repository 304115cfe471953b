"""The search between the styles is never slower than its start, and its plans run.

For small problems it equals brute force.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.step_graph import full_samples
from raymm.scheduler.search.evaluation import evaluate, step_timeline
from raymm.scheduler.styles import style_search
from raymm.scheduler.styles.blocks import StyleProblem
from raymm.scheduler.styles.style_search import IN_TIME, OWN, QUOTA, search_between, way_of


@st.composite
def style_problems(draw, most: int = 3) -> StyleProblem:
    """Draw up to three modules with falling surfaces, on up to four devices."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, ranks, steps = draw(st.integers(1, most)), draw(st.integers(1, 4)), 2
    names = [f"m{i}" for i in range(count)]
    edges = [
        pair for pair in itertools.combinations(names, 2)
        if pair[1] != names[-1] and draw(st.booleans())
    ]
    edges += [(name, names[-1]) for name in names[:-1]]
    graph = ModuleGraph(
        tuple(ModuleNode(name, (True,) * draw(st.integers(1, 3))) for name in names), tuple(edges)
    )
    profiles = {}
    for microbatches in draw(st.sampled_from([(1,), (3,), (1, 2)])):
        modules, surfaces = {}, []
        for node in graph.nodes:
            each = rng.uniform(0.2, 2.0, node.num_layers) / microbatches
            modules[node.name] = tuple(
                LayerCost(t, t, t, int(rng.integers(1, 9)), 4, 1) for t in map(float, each)
            )
            total, power = float(each.sum()), rng.uniform(0.3, 1.0)
            surfaces.append(ScalingSurface(
                node.name, (1, 2), (1, 2), 2,
                tuple(
                    tuple(total / (d * q / 2) ** float(power) for q in (1, 2)) for d in (1, 2)
                ),
                (0, 0), (0.2, 0.4),
            ))
        sharing = DeviceSharing(tuple(surfaces), Interference(product=0.5, coupling="own"))
        profiles[microbatches] = CostProfile(modules, sharing=sharing)
    return StyleProblem(
        graph, profiles, ranks, draw(st.sampled_from([None, None, 60, 150])), Network(), steps
    )


def everything(problem: StyleProblem):
    """Return the seconds of every plan of blocks, without code of the search."""
    names = [node.name for node in problem.graph.nodes]
    for count, profile in problem.profiles.items():
        for owners in itertools.product(range(len(names)), repeat=len(names)):
            groups = [[n for n, o in zip(names, owners, strict=True) if o == k] for k in
                      range(len(names))]  # fmt: skip
            groups = [group for group in groups if group]
            if [group[0] for group in groups] != sorted(group[0] for group in groups):
                continue
            ways = []
            for group in groups:
                if len(group) == 1:
                    layers = problem.graph.node(group[0]).num_layers
                    ways.append([(s, c, None) for s in range(1, layers + 1) for c in (1, 2)])
                else:
                    shares = [None] + [[0.5, 0.5]] * (len(group) == 2)
                    ways.append([(1, c, q) for c in (1, 2) for q in shares])
            for choice in itertools.product(*ways):
                if sum(s * c for s, c, _ in choice) > problem.ranks:
                    continue
                for again in (False, True):
                    stages, first = [], 0
                    for group, (parts, copies, quotas) in zip(groups, choice, strict=True):
                        for place, name in enumerate(group):
                            ranges = problem.partition(count, name, parts)
                            stages += [
                                Stage(
                                    name, i, layers, first + i * copies + c, c,
                                    recompute=again and name != names[-1],
                                    quota=quotas[place] if quotas else None,
                                    split="samples" if copies > 1 else "microbatches",
                                )
                                for c in range(copies) for i, layers in enumerate(ranges)
                            ]
                        first += parts * copies
                    plan = Plan(problem.graph, tuple(stages), count, "1f1b", profile,
                                problem.memory_limit)  # fmt: skip
                    option, unfit = evaluate(plan, problem.network)
                    if unfit is None:
                        yield option.seconds
                        break


@given(style_problems())
@settings(max_examples=12)
def test_the_style_search_equals_brute_force(problem):
    seconds = list(everything(problem))
    if not seconds:
        with pytest.raises(PlanError, match="no plan fits"):
            search_between(problem, {})
        return
    result = search_between(problem, {})
    assert result.exhaustive and result.best.seconds <= min(seconds) * (1 + 1e-9)
    plan = result.best.plan
    program = full_program(plan)
    check_program(program)
    if plan.splits_samples:
        check_samples(plan, program, full_samples(plan))
    assert len(result.lines()) == len(problem.graph.nodes)


@given(
    style_problems(), st.integers(5, 9), st.sampled_from(["cpu", "H100"]),
    st.permutations(["1f1b", "zero_bubble", "gpipe"]), st.integers(1, 2),
)
@settings(max_examples=12, deadline=None)
def test_the_best_plan_is_never_slower_than_its_1f1b(problem, count, device, schedules, node):
    """Use more microbatches than may be in flight, messages, and any order of schedules."""
    profile = replace(next(iter(problem.profiles.values())), device=device)
    network = Network(Link(0.1, 4.0), Link(0.2, 1.0), node)
    problem = replace(
        problem, profiles={count: profile}, network=network, schedules=tuple(schedules)
    )
    try:
        best = search_between(problem, {}).best
    except PlanError:
        return
    assert best.seconds == step_timeline(best.plan, network).makespan
    option, reason = evaluate(replace(best.plan, schedule="1f1b", policy=None), network)
    assert reason is not None or best.seconds <= option.seconds


@given(style_problems(), st.booleans())
@settings(max_examples=12)
def test_the_style_search_is_never_slower_than_its_start(problem, stopped):
    """Check local moves, too, an immediate end, and reproducibility."""
    try:
        start = search_between(problem, {}).best
    except PlanError:
        return
    before = style_search.FEW_LAYOUTS
    style_search.FEW_LAYOUTS = 0
    try:
        found = []
        for _ in range(2):
            control = SearchControl(0.0 if stopped else None)
            found.append(search_between(problem, {"best": start}, control))
            alone = None
            if not stopped and problem.memory_limit is None:
                alone = search_between(problem, {}, SearchControl())
                assert alone.best.seconds <= start.seconds * 1.5  # local moves find improvements
    finally:
        style_search.FEW_LAYOUTS = before
    assert found[0].best.seconds <= start.seconds
    if not stopped:
        assert found[0].best == found[1].best and not found[0].exhaustive


def test_encoders_are_guests_of_the_language_models_pipeline():
    """Use two encoders of half the language model's work on three devices.

    Two devices are not enough for the language model, three leave none for the encoders.
    """
    graph = ModuleGraph(
        (ModuleNode("a", (True,)), ModuleNode("b", (True,)), ModuleNode("llm", (True,) * 4)),
        (("a", "llm"), ("b", "llm")),
    )
    half = ((1.2, 1.2),)
    surfaces = tuple(ScalingSurface(n, (1,), (1, 2), 2, half, (0,), (0.1, 0.1)) for n in "ab")
    profile = CostProfile(
        {"a": (LayerCost(0.4, 0.0, 0.8),), "b": (LayerCost(0.4, 0.0, 0.8),),
         "llm": (LayerCost(0.2, 0.2, 0.2),) * 4},
        sharing=DeviceSharing(surfaces),
    )  # fmt: skip
    result = search_between(StyleProblem(graph, {8: profile}, 3, None, Network(), 2), {})
    assert [way_of(result.best.plan, name) for name in ("a", "b", "llm")] == [IN_TIME] * 3
    stages = result.best.plan.replicas("llm")[0]
    sizes = {stage.rank: stage.layers[1] - stage.layers[0] for stage in stages}
    assert sorted(sizes.values()) == [1, 1, 2]
    guests = {result.best.plan.replicas(name)[0][0].rank for name in "ab"}
    assert {sizes[rank] for rank in guests} == {1}
    # The costs of alternatives are those found during the search.
    assert result.ways["llm", OWN] > result.best.seconds < result.ways["a", QUOTA]
    assert "with a quota next to others +" in result.lines()[0]
