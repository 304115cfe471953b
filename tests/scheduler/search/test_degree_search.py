"""Degrees in addition to the pipeline: never slower, within memory and devices.

Results are near those of brute force.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.recomputation import LayerOption
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.degree_search import estimates
from raymm.scheduler.search.evaluation import Candidates, evaluate
from raymm.scheduler.search.module_degrees import KINDS, DegreeChoices, ModuleDegrees, degrees_of
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import find_plans, propose, within_memory
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_models import models

NETWORK = Network(Link(1e-3, 1e3), Link(1e-2, 1e2), 4)
ALL = DegreeChoices((1, 2, 4), (1, 2, 4), (1, 2, 4))
BLOCK = LayerCost(1.0, 1.0, 1.0, 4000, 1000, 8, 100, 4)
LLM = ModuleGraph((ModuleNode("llm", (True,) * 4),), ())
PROFILE = CostProfile({"llm": (BLOCK,) * 4})
SMALL = {"layouts": ("modality_parallel",), "chunks": (), "schedules": ("1f1b",)}


@settings(max_examples=12, deadline=None)
@given(
    models(most_encoders=2, llm_layers=3), st.integers(0, 5), st.sampled_from([1, 2, 4, 6]),
    st.one_of(st.none(), st.integers(20, 200)),
)
def test_degrees_are_never_slower_within_the_limits(model, more, microbatches, limit):
    graph, profile = model
    profile = replace(profile, links=NETWORK.links)
    ranks = len(graph.nodes) + more
    choices = {node.name: ALL for node in graph.nodes}
    found = []
    for degrees in ({}, choices):
        try:
            found.append(find_plans(PlanProblem(
                graph, profile, ranks, microbatches, limit, NETWORK, schedules=SMALL["schedules"],
                layouts=SMALL["layouts"], degrees=degrees,
            )))
        except NoPlanError:
            found.append(None)
    without, shared = found
    if without is not None:
        assert shared is not None and shared.best.seconds <= without.best.seconds
    if shared is None:
        return
    for option in shared.options:
        plan = option.plan
        assert plan.num_processes <= ranks
        for node in graph.nodes:
            degrees = degrees_of(plan, node.name)
            assert microbatches % degrees.dp == 0
            assert all(getattr(degrees, kind) in (1, 2, 4) for kind in KINDS)
        if limit is not None:
            assert max(need.total for need in option.memory) <= limit


def everything(graph, profile, ranks, microbatches, network=NETWORK, recompute=False):
    """Return the seconds of the best plan of every assignment, each searched."""
    found = Candidates(network, ("1f1b",))
    best = {}
    all_degrees = [
        ModuleDegrees(dp, cp, tp) for dp, cp, tp in itertools.product((1, 2, 4), repeat=3)
        if microbatches % dp == 0
    ]
    for chosen in itertools.product(all_degrees, repeat=len(graph.nodes)):
        degrees = {node.name: one for node, one in zip(graph.nodes, chosen, strict=True)}
        try:
            space = StageSpace(
                graph, profile, ranks, microbatches, degrees=degrees, recompute=recompute
            )
            best[chosen] = joint_search(space, found.seconds, alternatives=0).best.seconds
        except NoPlanError:
            continue
    return best


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("bandwidth", [1e1, 1e3])
def test_degrees_equal_brute_force_on_one_module(microbatches, bandwidth):
    network = Network(Link(1e-3, bandwidth), Link(1e-2, bandwidth / 10), 4)
    profile = replace(PROFILE, links=network.links)
    best = everything(LLM, profile, 8, microbatches, network)
    found = propose(PlanProblem(
        LLM, profile, 8, microbatches, network=network, degrees={"llm": ALL}, **SMALL
    ))
    assert found.best.seconds <= min(best.values()) * 1.01


def exhaustive(problem: PlanProblem) -> float:
    """Return the seconds of the fastest plan that fits, of all degrees, stage counts and schedules.
    """
    names = [node.name for node in problem.graph.nodes]
    sharding = "none" if problem.memory_limit is None else "zero1"
    every = [
        list(problem.degrees[name].within(
            problem.ranks, problem.network.ranks_per_node, problem.num_microbatches, sharding
        ))
        for name in names
    ]
    best = math.inf
    for chosen in itertools.product(*every):
        degrees = dict(zip(names, chosen, strict=True))
        if sum(own.devices for own in chosen) > problem.ranks:
            continue
        space = within_memory(StageSpace(
            problem.graph, problem.profile, problem.ranks, problem.num_microbatches,
            memory_limit=problem.memory_limit, degrees=degrees,
        ))
        for counts in space.combinations():
            try:
                plan = space.plan(counts)
            except NoPlanError:  # memory excludes so few stages
                continue
            for schedule in problem.schedules:
                option, reason = evaluate(replace(plan, schedule=schedule), problem.network)
                if reason is None:
                    best = min(best, option.seconds)
    return best


def small_problem(seed: int) -> PlanProblem:
    """Return a language model, perhaps with an encoder, on 4 to 6 devices, with random costs."""
    draw = random.Random(seed)
    names = ["encoder", "llm"][draw.randint(0, 1) :]
    modules = {
        name: tuple(
            LayerCost(
                draw.uniform(0.2, 1.5), draw.uniform(0.2, 1.5), draw.uniform(0.2, 1.5),
                draw.randint(100, 2000), draw.randint(50, 1000), draw.randint(1, 20),
                draw.randint(0, 50), 4,
            )
            for _ in range(draw.randint(2, 3))
        )
        for name in names
    }
    nodes = tuple(
        ModuleNode(name, (draw.random() < 0.7,) * len(layers)) for name, layers in modules.items()
    )
    near = Link(10 ** draw.uniform(-3, -1), 10 ** draw.uniform(1.5, 4))
    network = Network(near, Link(0.1, 100.0), 4)
    choices = DegreeChoices((1, 2), (1, 2), (1, 2, 4))
    microbatches = draw.choice([2, 4]) if len(names) == 1 else 2
    return PlanProblem(
        ModuleGraph(nodes, tuple((name, "llm") for name in names[:-1])),
        CostProfile(modules, links=network.links), draw.randint(4, 6), microbatches,
        network=network, recompute=False, layouts=("modality_parallel",), chunks=(),
        degrees=dict.fromkeys(names, choices),
    )


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_are_within_a_hundredth_of_exhaustive(seed):
    problem = small_problem(seed)
    best = find_plans(problem).best
    assert best.seconds <= exhaustive(problem) * 1.01
    if seed % 3 == 0:
        need = max(rank.total for rank in best.memory)
        tight = replace(problem, memory_limit=int(0.9 * need))
        try:
            seconds = find_plans(tight).best.seconds
        except NoPlanError:
            seconds = math.inf
        assert seconds <= exhaustive(tight) * 1.01


@settings(max_examples=15, deadline=None)
@given(
    models(most_encoders=1, llm_layers=3, most_heads=1), st.integers(0, 2),
    st.sampled_from([1, 2, 4]), st.booleans(),
)
def test_bounds_of_estimates_hold(model, more, microbatches, recompute):
    """Include recomputation in all stages except the loss's."""
    graph, profile = model
    profile = replace(profile, links=NETWORK.links)
    ranks = len(graph.nodes) + more
    best = everything(graph, profile, ranks, microbatches, recompute=recompute)
    space = StageSpace(graph, profile, ranks, microbatches, recompute=recompute)
    found = estimates(space, {node.name: ALL for node in graph.nodes}, 4, "none")
    by_degrees = {tuple(one.degrees[n.name] for n in graph.nodes): one for one in found}
    assert set(by_degrees) == set(best)
    for chosen, one in by_degrees.items():
        assert one.bound <= best[chosen] * (1 + 1e-9)


def test_the_bound_with_stages_that_do_not_recompute():
    """Use an encoder of one stage, whose first layer has no backward and recomputes nothing.

    Its second layer's forward counts once.
    """
    graph = ModuleGraph(
        (ModuleNode("encoder", (False, True)), ModuleNode("llm", (False,))), (("encoder", "llm"),)
    )
    nothing, forward = LayerCost(0.0, 0.0, 0.0), LayerCost(1.0, 0.0, 0.0)
    profile = CostProfile({"encoder": (nothing, forward), "llm": (nothing,)}, links=NETWORK.links)
    best = everything(graph, profile, 3, 2, recompute=True)
    space = StageSpace(graph, profile, 3, 2, recompute=True)
    found = estimates(space, {node.name: ALL for node in graph.nodes}, 4, "none")
    for one in found:
        assert one.bound <= best[tuple(one.degrees[n.name] for n in graph.nodes)] * (1 + 1e-9)


def test_many_microbatches_favour_replicas():
    few = propose(PlanProblem(
        LLM, PROFILE, 8, 1, network=NETWORK, degrees={"llm": ALL}, **SMALL
    )).best.plan
    degrees = degrees_of(few, "llm")
    assert degrees.dp == 1 and degrees.tp * degrees.cp > 1
    slow = Network(Link(1.0, 1.0), Link(1.0, 1.0), 4)
    # With slow links, one sum of gradients at the end is cheaper than a pipeline's bubble.
    cheap = CostProfile({"llm": (replace(BLOCK, parameter_bytes=1, replicated_bytes=0),) * 4})
    many = propose(PlanProblem(
        LLM, cheap, 4, 4, network=slow, degrees={"llm": ALL}, **SMALL
    )).best.plan
    assert degrees_of(many, "llm").tp == 1


def test_memory_limits_require_tensor_parallelism():
    """Use four layers of more than 4000 bytes of state, which two devices hold in halves."""
    heavy = CostProfile(
        {"llm": (replace(BLOCK, parameter_bytes=1000, activation_bytes=0, replicated_bytes=0),)},
        links=NETWORK.links,
    )
    graph = ModuleGraph((ModuleNode("llm", (True,)),), ())
    options = {"network": NETWORK, "memory_limit": 2500, **SMALL}
    with pytest.raises(NoPlanError):
        propose(PlanProblem(graph, heavy, 2, 2, **options))
    plan = propose(PlanProblem(graph, heavy, 2, 2, degrees={"llm": ALL}, **options)).best.plan
    assert degrees_of(plan, "llm").tp == 2


def test_optimizer_state_is_sharded_if_memory_is_limited():
    heavy = CostProfile(
        {"llm": (replace(BLOCK, parameter_bytes=1000, activation_bytes=0),)}, links=NETWORK.links
    )
    graph = ModuleGraph((ModuleNode("llm", (True,)),), ())
    choices = {"llm": DegreeChoices(dp=(1, 2))}
    found = propose(PlanProblem(
        graph, heavy, 2, 2, degrees=choices, network=NETWORK, memory_limit=4000, **SMALL
    ))
    assert degrees_of(found.best.plan, "llm") == ModuleDegrees(2, 1, 1, "zero1")
    # Gradients are copied into the sum's buffer.
    assert [(need.state, need.update) for need in found.best.memory] == [(3000, 1000)] * 2


def test_layers_that_recompute_need_less_memory():
    """Use 2864 bytes per device without recomputation; with some, 2600 are enough."""
    cost = replace(
        BLOCK, activation_bytes=1000, parameter_bytes=100, replicated_bytes=0,
        options=(LayerOption("all", 1.0, 10),),
    )
    profile = CostProfile({"llm": (cost,) * 4}, links=NETWORK.links)
    problem = PlanProblem(
        LLM, profile, 2, 4, network=NETWORK, memory_limit=2600,
        degrees={"llm": DegreeChoices(tp=(2,))}, **SMALL,
    )
    space = StageSpace(LLM, profile, 2, 4, memory_limit=2600)
    choices = problem.degrees
    assert not estimates(space, choices, 4, "zero1")
    (estimate,) = estimates(within_memory(space, adaptive=True), choices, 4, "zero1")
    best = propose(problem).best
    (stage,) = best.plan.stages
    assert stage.tp == 2 and set(stage.layer_options) == {"keep", "all"}
    assert estimate.bound <= best.seconds
    for again in (False, True):  # a loss's stage never recomputes entirely
        with pytest.raises(NoPlanError):
            propose(replace(problem, recompute=again))


def test_choices_are_numbers():
    with pytest.raises(PlanError, match=r"tp is \(0,\); it must be whole numbers"):
        DegreeChoices(tp=(0,))
    with pytest.raises(PlanError, match=r"dp is \(\)"):
        DegreeChoices(dp=())
    assert list(DegreeChoices((1, 3), (1,), (1, 2)).within(3, 4, 3, "none")) == [ModuleDegrees()]
