"""The planner equals an evaluation of every plan, on small models."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.memory import rank_memory
from raymm.scheduler.schedule.network import Network, edge_transfers
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedules.registry import SCHEDULES
from raymm.scheduler.search.evaluation import Proposal, evaluate, step_timeline
from raymm.scheduler.search.layouts import colocated, replicated
from raymm.scheduler.search.module_degrees import make_plan
from raymm.scheduler.search.options import LAYOUTS, PlanProblem
from raymm.scheduler.search.planner import FINALISTS, MOST_WINDOWS, propose, within_memory
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_models import models, spaces
from tests.support.random_plans import contents

Model = tuple[ModuleGraph, CostProfile]


def needed(plan: Plan) -> list[int]:
    """Return the bytes per rank of the executed program."""
    return [need.total for need in rank_memory(plan, full_program(plan))]


def seconds(plan: Plan, near: Link | None = None, far: Link | None = None, node: int = 1) -> float:
    transfers = edge_transfers(plan, near, far, node) if near else None
    program = full_program(plan)
    return simulate(
        program, op_seconds(plan), transfers=transfers, posted=plan.posted_receives
    ).makespan


def depth_bytes(plan: Plan, name: str) -> int:
    """Return the bytes that 1F1B may hold in a stage on a separate rank, for any step.

    They are a microbatch for each stage on the way to the loss.
    """
    stage, cost = plan.by_id[name], stage_costs(plan)[name]
    live = min(plan.depth[name], plan.num_microbatches)
    always = cost.state_bytes + cost.message_bytes + cost.forward_bytes + cost.remade_bytes
    if stage.recompute:
        return always + live * cost.input_bytes + cost.activation_bytes
    return always + live * cost.activation_bytes


def cuts(layers: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    found = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *inner, layers]
        found.append(tuple(itertools.pairwise(ends)))
    return found


def brute_force(space: StageSpace, limit: int) -> list[list[float]]:
    """Return the seconds for every number of stages of every module.

    Each module is cut by trying all cuts and taking the least bottleneck and then squares, among
    those whose stages fit. There are several values if cuts are equally good.
    """
    graph = space.graph
    evaluated = []
    sizes = [range(1, node.num_layers + 1) for node in graph.nodes]
    for chosen in itertools.product(*sizes):
        if sum(chosen) > space.ranks:
            continue
        counts = list(zip(graph.nodes, chosen, strict=True))
        anyhow = {node.name: cuts(node.num_layers, count)[0] for node, count in counts}
        best = []
        for node, count in counts:
            table = space.stage_seconds(node.name)
            scores = {}
            for ranges in cuts(node.num_layers, count):
                plan = made_of(space, {**anyhow, node.name: ranges})
                if all(depth_bytes(plan, s.id) <= limit for s in plan.module_stages(node.name)):
                    times = [table[pair] for pair in ranges]
                    scores[ranges] = (max(times), sum(t * t for t in times))
            best.append([r for r, score in scores.items() if score == min(scores.values())])
        times = []
        for ways in itertools.product(*best):
            names = [node.name for node in graph.nodes]
            times.append(seconds(made_of(space, dict(zip(names, ways, strict=True)))))
        if times:
            evaluated.append(times)
    return evaluated


def made_of(space: StageSpace, partitions: dict) -> Plan:
    return make_plan(
        space.graph, partitions, space.num_microbatches, profile=space.profile,
        recompute=space.recompute,
    )


@st.composite
def heavy_models(draw: st.DrawFn) -> Model:
    """Draw models that are mostly activations, so that recomputation helps."""
    graph, profile = draw(models(llm_layers=4))
    modules = {
        name: tuple(
            replace(c, activation_bytes=8 * c.activation_bytes, parameter_bytes=0) for c in costs
        )
        for name, costs in profile.modules.items()
    }
    return graph, replace(profile, modules=modules)


@given(
    st.one_of(models(llm_layers=4), heavy_models()), st.integers(0, 3), st.integers(1, 5),
    st.integers(1, 160),
)
def test_stage_counts_within_memory(model: Model, more: int, microbatches: int, limit: int) -> None:
    graph, profile = model
    ranks = len(graph.nodes) + more
    options = {"schedules": ("1f1b",), "layouts": ("modality_parallel",), "chunks": ()}
    found: Proposal | None
    try:
        found = propose(PlanProblem(
            graph, profile, ranks, microbatches, memory_limit=limit, **options
        ))
    except NoPlanError:
        found = None
    for recompute in (False, True):
        space = StageSpace(graph, profile, ranks, microbatches, recompute=recompute)
        if every := brute_force(space, limit):
            break
    assert (found is None) == (not every)
    if found is None:
        return
    # Recomputation only if nothing fits otherwise.
    assert recompute or not any(s.recompute for s in found.best.plan.stages)
    # The three best; any of several equal cuts is accepted.
    low, high = sorted(map(min, every))[:3], sorted(map(max, every))[:3]
    assert len(found.options) == len(low)
    for option, least, most in zip(found.options, low, high, strict=True):
        assert least - 1e-5 <= option.seconds <= most + 1e-5


@given(models(), st.integers(0, 3), st.integers(1, 5), st.integers(1, 300), st.data())
def test_guarantees_of_every_option(
    model: Model, more: int, microbatches: int, limit: int, data: st.DataObject
) -> None:
    graph, profile = model
    ranks = len(graph.nodes) + more
    network = Network(Link(1.0, 8.0), Link(3.0, 2.0), data.draw(st.integers(1, 3)))
    network = data.draw(st.sampled_from([Network(), network]))
    schedules = data.draw(st.lists(st.sampled_from(SCHEDULES), min_size=1, unique=True))
    layouts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, unique=True))
    try:
        found = propose(PlanProblem(
            graph, profile, ranks, microbatches, memory_limit=limit, network=network,
            recompute=data.draw(st.sampled_from([None, False, True])), schedules=schedules,
            layouts=layouts,
        ))
    except NoPlanError as error:
        assert str(error).startswith("no plan fits: ") and str(error) != "no plan fits: "
        return
    links = (network.within_node, network.across_nodes, network.ranks_per_node) if network else ()
    for option in found.options:
        plan = option.plan
        check_program(full_program(plan))
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.num_ranks <= ranks and plan.num_microbatches == microbatches
        assert plan.schedule in schedules and option.layout.split(",")[0] in layouts
        assert plan.memory_limit == limit
        assert [need.total for need in option.memory] == needed(plan)
        assert max(needed(plan)) <= limit
        # The reported seconds are those of the executed program, with its messages.
        assert option.seconds == pytest.approx(seconds(plan, *links), abs=1e-5)
    assert found.best.seconds == min(option.seconds for option in found.options)
    assert found.bound <= found.best.seconds + 1e-6
    for label, reason in found.refused:
        assert label and reason
        if reason.startswith("rank "):
            assert re.search(r"^rank \d+ \(.+\) needs [\d,]+ bytes: .*limit is [\d,]+ by", reason)


@settings(deadline=None, max_examples=12)
@given(
    models(llm_layers=3), st.integers(0, 2), st.integers(1, 9), st.sampled_from(["cpu", "H100"]),
    st.sampled_from([0.25, 1.0, 8.0]), st.one_of(st.none(), st.integers(50, 300)),
)
def test_the_best_plan_is_never_slower_than_its_1f1b(
    model: Model, more: int, microbatches: int, device: str, bandwidth: float, limit: int | None
) -> None:
    """Compare with all 1F1B plans, including messages, the device's receives and any layout."""
    graph, profile = model
    problem = PlanProblem(
        graph, replace(profile, device=device), len(graph.nodes) + more, microbatches,
        memory_limit=limit, network=Network(Link(0.5, bandwidth), Link(1.0, bandwidth), 2),
        chunks=(2,),
    )
    try:
        best = propose(problem).best
    except NoPlanError:
        return
    assert best.seconds == step_timeline(best.plan, problem.network).makespan
    plain = replace(best.plan, schedule="1f1b", policy=None)
    option, reason = evaluate(plain, problem.network)
    if reason is None:
        assert best.seconds <= option.seconds
    with suppress(NoPlanError):
        assert best.seconds <= propose(replace(problem, schedules=("1f1b",))).best.seconds


@given(st.data())
def test_steps_of_any_content_fit(data: st.DataObject) -> None:
    """Use text-only steps, which fill the pipeline more than steps that wait for an encoder."""
    graph, profile = data.draw(models())
    limit = data.draw(st.integers(1, 200))
    try:
        found = propose(PlanProblem(
            graph, profile, len(graph.nodes) + 2, 5, memory_limit=limit, schedules=("1f1b",),
            layouts=("modality_parallel",),
        ))
    except NoPlanError:
        return
    for option in found.options:
        program = lower(option.plan, data.draw(contents(option.plan)))
        assert all(need.total <= limit for need in rank_memory(option.plan, program))


@given(st.data())
def test_feasible_stages_are_those_that_fit(data: st.DataObject) -> None:
    space = data.draw(spaces())
    partitions = {
        n.name: data.draw(st.sampled_from([
            c for k in range(1, n.num_layers + 1) for c in cuts(n.num_layers, k)
        ]))
        for n in space.graph.nodes
    }
    plan = made_of(space, partitions)
    program = full_program(plan)
    live = check_program(program).live_activations
    counts = {module: len(ranges) for module, ranges in partitions.items()}
    for stage, need in zip(plan.topological_stages, rank_memory(plan, program), strict=True):
        beyond = space.beyond(stage.module, counts)
        deep = min(plan.depth[stage.id], plan.num_microbatches)
        for limit in (need.total - 1, need.total, depth_bytes(plan, stage.id)):
            memory = within_memory(replace(space, memory_limit=limit)).memory
            fits = np.isfinite(memory.added(stage.module, counts[stage.module], beyond))
            assert fits.shape[1:] == (space.graph.node(stage.module).num_layers + 1,) * 2
            feasible = bool(fits[stage.index][stage.layers])
            assert feasible == (depth_bytes(plan, stage.id) <= limit)
            if feasible:
                assert need.total <= limit
            # Only a stage that 1F1B cannot fill (it waits for a slow one) needs less.
            elif need.total <= limit:
                assert live[stage.id] < deep


@given(models(), st.integers(0, 3), st.integers(1, 5))
def test_messages_never_lower_the_bound(model: Model, more: int, microbatches: int) -> None:
    graph, profile = model
    ranks = len(graph.nodes) + more
    options = {"schedules": ("1f1b",), "chunks": ()}
    free = propose(PlanProblem(graph, profile, ranks, microbatches, **options))
    slow = Network(Link(1.0, 4.0), Link(2.0, 1.0), 2)
    found = propose(PlanProblem(graph, profile, ranks, microbatches, network=slow, **options))
    for option in found.options:
        # Its program is the one for instant messages.
        assert option.seconds >= seconds(option.plan) - 1e-5
        assert lower_bound(option.plan, slow.delays(option.plan)) >= lower_bound(option.plan)
    parallel = [o for o in found.options if o.layout == "modality_parallel"]
    assert min(o.seconds for o in parallel) >= min(
        o.seconds for o in free.options if o.layout == "modality_parallel"
    ) - 1e-5


@given(models(most_encoders=2, chains=False), st.integers(0, 4), st.integers(1, 200))
def test_other_layouts_are_the_best_that_fit(model: Model, more: int, limit: int) -> None:
    graph, profile = model
    ranks = len(graph.nodes) + more
    space = StageSpace(graph, profile, ranks, 4, memory_limit=limit)
    encoders = [node for node in graph.nodes if node.name != "llm"]
    layers = graph.node("llm").num_layers
    plans = {"colocated": [], "replicated": []}
    if encoders:
        stages = min(ranks, layers)
        windows = [range(a, b) for a in range(stages) for b in range(a + 1, stages + 1)]
        chosen = list(itertools.product(windows, repeat=len(encoders)))
        if len(chosen) > MOST_WINDOWS:
            chosen = [(range(n),) * len(encoders) for n in {1, 2, 4, stages} if n <= stages]
        names = [node.name for node in encoders]
        plans["replicated"] = [
            replicated(space, stages, dict(zip(names, some, strict=True))) for some in chosen
        ]
        plans["colocated"] = [
            colocated(space, first, second)
            for first in range(1, max(n.num_layers for n in encoders) + 1)
            for second in range(1, layers + 1) if first + second <= ranks
            if second == min(layers, ranks - first)  # as many as there are
        ]
    for layout, every in plans.items():
        fitting = [seconds(plan) for plan in every if max(needed(plan)) <= limit]
        try:
            found = propose(PlanProblem(
                graph, profile, ranks, 4, memory_limit=limit, recompute=False,
                schedules=("1f1b",), layouts=(layout,),
            ))
        except NoPlanError:
            assert not fitting
        else:
            assert [o.seconds for o in found.options] == pytest.approx(
                sorted(fitting)[:FINALISTS], abs=1e-5
            )


def small(parameter_bytes: int = 4, **changes: float) -> Model:
    """Return a frozen encoder of two layers and a projector, into a frozen LLM of four."""
    cost = LayerCost(**{
        "forward": 1, "backward_input": 1, "backward_weight": 1, "activation_bytes": 10,
        "parameter_bytes": parameter_bytes, "output_bytes": 2, **changes,
    })
    graph = ModuleGraph(
        (ModuleNode("vision", (False, False, True), projector=True),
         ModuleNode("llm", (False,) * 4)), (("vision", "llm"),),
    )
    return graph, CostProfile({"vision": (cost,) * 3, "llm": (cost,) * 4})


def test_recomputes_only_if_nothing_else_fits() -> None:
    graph, profile = small()
    plenty = propose(PlanProblem(graph, profile, 4, 8, memory_limit=1000))
    assert not any(s.recompute for o in plenty.options for s in o.plan.stages)
    tight = propose(PlanProblem(
        graph, profile, 4, 8, memory_limit=60, layouts=("modality_parallel",)
    ))
    assert any(s.recompute for s in tight.best.plan.stages)
    assert "recomputing" in tight.best.label
    with pytest.raises(NoPlanError, match="modality_parallel: no plan found .* 4 ranks"):
        propose(PlanProblem(graph, profile, 4, 8, memory_limit=60, layouts=("modality_parallel",),
                recompute=False))


def test_a_layout_that_does_not_fit_leaves_the_others() -> None:
    """Let two replicas hold half of the LLM each; the other layouts give it a single rank."""
    graph, profile = small(parameter_bytes=4, activation_bytes=0, output_bytes=0)
    # Per layer 4 bytes frozen, 16 trained: the encoder 24. Replicas sum its gradients in 4 more.
    both = propose(PlanProblem(
        graph, profile, 2, 4, memory_limit=36, schedules=("1f1b",), chunks=()
    ))
    assert {o.layout for o in both.options} == {"modality_parallel", "colocated", "replicated"}
    short = replace(
        profile, modules={**profile.modules, "vision": (LayerCost(1, 1, 1),) * 3}
    )
    found = propose(PlanProblem(graph, short, 2, 4, memory_limit=8, schedules=("1f1b",), chunks=()))
    assert {o.layout for o in found.options} == {"replicated"}
    refused = dict(found.refused)
    assert "fits in memory" in refused["modality_parallel"]
    (reason,) = {why for label, why in refused.items() if label.startswith("colocated")}
    assert reason.startswith("rank 1 (llm.0) needs 16 bytes: 16 bytes of weights")
    assert reason.endswith("memory_limit is 8 bytes")


def test_the_fastest_split_of_ranks_may_not_fit() -> None:
    graph = ModuleGraph(
        (ModuleNode("vision", (False,) * 2), ModuleNode("llm", (False,) * 2)), (("vision", "llm"),)
    )
    profile = CostProfile({
        "vision": (LayerCost(1, 0, 0, parameter_bytes=20),) * 2,
        "llm": (LayerCost(5, 0, 0, parameter_bytes=4),) * 2,
    })
    options = {"schedules": ("1f1b",), "layouts": ("colocated",)}
    free = propose(PlanProblem(graph, profile, 3, 4, **options)).best
    assert [len(free.plan.module_stages(m)) for m in ("vision", "llm")] == [1, 2]
    tight = propose(PlanProblem(graph, profile, 3, 4, memory_limit=30, **options)).best
    assert [len(tight.plan.module_stages(m)) for m in ("vision", "llm")] == [2, 1]
    assert tight.seconds > free.seconds


def test_more_ranks_than_layers() -> None:
    graph, profile = small()
    found = propose(PlanProblem(graph, profile, 100, 8, schedules=("1f1b",), chunks=()))
    ranks = {option.layout: option.plan.num_ranks for option in found.options}
    assert ranks["replicated"] == 4 and ranks["colocated"] <= 7
    assert found.best.plan.num_ranks <= 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": ("ring",)}, "layouts has 'ring'; accepted: modality_parallel, colocated"),
        ({"layouts": ()}, "layouts is empty; accepted"),
        ({"schedules": ("1f1b", "dual")}, "schedules has 'dual'; accepted: 1f1b, zero_bubble"),
        ({"schedules": ()}, "schedules is empty; accepted"),
        ({"chunks": (2, 1)}, r"chunks is \(2, 1\); each must be a whole number, at least 2"),
        ({"chunks": (2.5,)}, r"chunks is \(2.5,\); each must be a whole number"),
        ({"ranks": 1}, "ranks is 1; 2 modules need at least one each"),
        ({"ranks": 0}, "ranks is 0; it must be a whole number, at least 1"),
        ({"ranks": 4.5}, "ranks is 4.5; it must be a whole number"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be a whole number"),
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0; it must be a whole number"),
        ({"memory_limit": 0}, "memory_limit is 0; it must be a whole number, at least 1"),
        ({"memory_limit": 8e9}, "memory_limit is 8000000000.0; it must be a whole number"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
    ],
)
def test_rejected_planning_problems(options: dict, message: str) -> None:
    graph, profile = small()
    with pytest.raises(ValueError, match=message):
        propose(PlanProblem(graph, profile, **{"ranks": 4, "num_microbatches": 2, **options}))


def test_odd_inputs() -> None:
    graph, profile = small()
    with pytest.raises(PlanError, match="lacks module 'llm'"):
        propose(PlanProblem(graph, CostProfile({"vision": profile.modules["vision"]}), 4, 2))
    with pytest.raises(NoPlanError, match="no plan fits: modality_parallel"):
        propose(PlanProblem(graph, profile, 4, 2, memory_limit=1))
    assert propose(PlanProblem(graph, profile, 4, 2, memory_limit=10**30)).best.seconds > 0
    nothing = propose(PlanProblem(*small(forward=0, backward_input=0, backward_weight=0), 4, 3))
    assert nothing.best.seconds == pytest.approx(0, abs=1e-5) and nothing.bound == 0


def test_one_layer_on_one_rank() -> None:
    graph = ModuleGraph((ModuleNode("llm", (True,)),), ())
    profile = CostProfile({"llm": (LayerCost(1, 2, 3, 5, 4),)})
    found = propose(PlanProblem(graph, profile, 1, 1))
    # The first layer's input needs no gradient.
    assert found.best.seconds == pytest.approx(4) and found.bound == 4
    assert [need.total for need in found.best.memory] == [5 + 16]
    assert {layout for layout, _ in found.refused} == {"colocated", "replicated"}


def test_shapes_of_feasible() -> None:
    graph, profile = small()
    space = StageSpace(graph, profile, 4, 8)
    memory = within_memory(replace(space, memory_limit=10**9)).memory
    fits = np.isfinite(memory.added("llm", 2, 0))
    assert fits.shape == (2, 5, 5) and fits.dtype == np.bool_
