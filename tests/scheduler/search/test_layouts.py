"""Layouts: positions of layers, and valid programs."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, has_backward
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import FORWARDS, Op
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedules.registry import SCHEDULES
from raymm.scheduler.search.layouts import chunked, colocated, encoders_into_backbone, replicated
from raymm.scheduler.search.planner import time_shared_plans
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_models import spaces
from tests.support.random_plans import contents


def covered(plan: Plan) -> None:
    """Check that every replica of every module runs each of its layers once, in order."""
    for node in plan.graph.nodes:
        for chain in plan.replicas(node.name):
            layers = [layer for stage in chain for layer in range(*stage.layers)]
            assert layers == list(range(node.num_layers))
    assert {stage.rank for stage in plan.stages} == set(range(plan.num_ranks))


def runs(data: st.DataObject, plan: Plan) -> None:
    """Check that under every schedule each microbatch passes once through one replica."""
    present = data.draw(contents(plan))
    for schedule in SCHEDULES:
        program = lower(replace(plan, schedule=schedule), present)
        check_program(program)
        ran = Counter(
            (plan.by_id[i.stage].module, layer, i.microbatch)
            for rank in program for i in rank if i.op in FORWARDS
            for layer in range(*plan.by_id[i.stage].layers)
        )
        wanted = Counter()
        for microbatch, modules in enumerate(present):
            reached = {*modules, *plan.graph.losses}
            for module in plan.graph.topological:
                if reached.intersection(plan.graph.producers(module)):
                    reached.add(module)
            for module in reached:
                for layer in range(plan.graph.node(module).num_layers):
                    wanted[module, layer, microbatch] += 1
        assert ran == wanted


def least_bottleneck(space: StageSpace, module: str, stages: int) -> float:
    """Return the least bottleneck of all cuts."""
    seconds = space.stage_seconds(module)

    def best(lo: int, left: int) -> float:
        last = space.graph.node(module).num_layers
        if left == 1:
            return seconds[lo, last]
        return min(
            max(seconds[lo, hi], best(hi, left - 1)) for hi in range(lo + 1, last - left + 2)
        )

    return best(0, stages)


def balanced(space: StageSpace, plan: Plan) -> None:
    for node in plan.graph.nodes:
        chain = plan.replicas(node.name)[0]
        slowest = max(space.stage_seconds(node.name)[s.layers] for s in chain)
        assert slowest == least_bottleneck(space, node.name, len(chain))


@given(st.data())
def test_chunked(data: st.DataObject) -> None:
    space = data.draw(spaces(llm_layers=9))
    chunks = data.draw(st.integers(2, 3))
    counts = {
        node.name: data.draw(st.integers(1, max(1, node.num_layers // 2)))
        for node in space.graph.nodes
    }
    backward = has_backward(space.graph)
    # Several ranks, a layer for every chunk, and no run of layers that has only forwards.
    can = {
        node.name: counts[node.name] > 1
        and node.num_layers >= chunks * counts[node.name]
        and False not in backward[node.name][1:]
        for node in space.graph.nodes
    }
    if not any(can.values()):
        with pytest.raises(NoPlanError, match=f"no module can have {chunks} chunks"):
            chunked(space, counts, chunks)
        return
    plan = chunked(space, counts, chunks)
    covered(plan)
    balanced(space, plan)
    assert plan.num_ranks == sum(counts.values())
    seen: set[int] = set()
    for module, count in counts.items():
        ranks = [stage.rank for stage in plan.module_stages(module)]
        own = sorted(set(ranks))
        assert len(own) == count and not seen.intersection(own)  # separate ranks
        seen.update(own)
        assert ranks == own * (chunks if can[module] else 1)  # rank by rank in turn
    runs(data, plan)


@given(st.data())
def test_colocated(data: st.DataObject) -> None:
    space = data.draw(spaces(chains=False))
    graph = space.graph
    encoders = [node.name for node in graph.nodes if node.name != "llm"]
    assume(encoders)
    first = data.draw(st.integers(1, 4))
    second = data.draw(st.integers(1, graph.node("llm").num_layers))
    plan = colocated(space, first, second)
    covered(plan)
    balanced(space, plan)
    # No rank stays empty when all encoders are short.
    used = min(first, max(graph.node(name).num_layers for name in encoders))
    assert plan.num_ranks == used + second
    for name in encoders:
        ranks = [stage.rank for stage in plan.module_stages(name)]
        assert ranks == list(range(used - len(ranks), used))
        assert len(ranks) == min(first, graph.node(name).num_layers)
    assert [s.rank for s in plan.module_stages("llm")] == list(range(used, used + second))
    runs(data, plan)


@given(st.data())
def test_replicated(data: st.DataObject) -> None:
    space = data.draw(spaces(chains=False))
    graph = space.graph
    encoders = [node.name for node in graph.nodes if node.name != "llm"]
    assume(encoders)
    ranks = data.draw(st.integers(1, graph.node("llm").num_layers))
    plan = replicated(space, ranks)
    covered(plan)
    balanced(space, plan)
    assert plan.num_ranks == ranks
    assert [s.rank for s in plan.module_stages("llm")] == list(range(ranks))
    copies = min(ranks, space.num_microbatches)  # more would have no work
    for name in encoders:
        assert [s.rank for s in plan.module_stages(name)] == list(range(copies))
    everything = [list(encoders)] * space.num_microbatches
    for rank, instructions in enumerate(lower(plan, everything)):
        for i in instructions:
            if i.op in FORWARDS and plan.by_id[i.stage].module in encoders:
                assert i.microbatch % copies == rank
    runs(data, plan)


@given(spaces(most_heads=2))
def test_which_models_have_encoders_into_the_backbone(space: StageSpace) -> None:
    graph = space.graph
    others = {node.name for node in graph.nodes} - {graph.backbone} - graph.followers
    into = {edge for edge in graph.edges if edge[0] in others or edge[1] in others}
    if others and into == {(name, graph.backbone) for name in others}:
        assert set(encoders_into_backbone(graph)) == others
    else:
        for make in (lambda: colocated(space, 1, 1), lambda: replicated(space, 1)):
            with pytest.raises(NoPlanError, match="this layout is for"):
                make()


@settings(deadline=None)
@given(spaces(most_heads=2, chains=False), st.data())
def test_successors_of_the_backbone_are_on_its_last_rank(space: StageSpace, data) -> None:
    """Check every layout that shares ranks; any modules may have losses."""
    graph = space.graph
    ranks = data.draw(st.integers(1, graph.node(graph.backbone).num_layers))
    plans = [plan for _, plan in time_shared_plans(space, ranks)]
    with suppress(NoPlanError):
        plans += [colocated(space, 1, ranks), replicated(space, ranks)]
    assert plans
    for plan in plans:
        covered(plan)
        last = plan.module_stages(graph.backbone)[-1].rank
        for name in graph.followers:
            assert {stage.rank for stage in plan.module_stages(name)} == {last}
        check_program(full_program(plan))


def test_the_backbone():
    def graph(*edges, **layers):
        names = dict.fromkeys(name for edge in edges for name in edge)
        read = {producer for producer, _ in edges}
        nodes = tuple(
            ModuleNode(n, (True,) * layers.get(n, 1), loss=n not in read) for n in names
        )
        return ModuleGraph(nodes, edges)

    vlm = graph(("vision", "llm"), ("llm", "head"), ("llm", "flow"), vision=40, llm=32, flow=6)
    assert (vlm.backbone, vlm.followers) == ("llm", {"head", "flow"})
    clip = graph(("image", "loss"), ("text", "loss"), image=12, text=12)
    assert (clip.backbone, clip.followers) == ("loss", set())
    bind = graph(("image", "a"), ("text", "a"), ("image", "b"), ("audio", "b"), image=32, text=12)
    assert (bind.backbone, bind.followers) == ("image", {"a", "b"})
    chain = graph(("sam", "clip"), ("clip", "llm"), sam=12, clip=24, llm=28)
    assert (chain.backbone, chain.followers) == ("llm", set())


def two_encoders(edges: tuple[tuple[str, str], ...]) -> StageSpace:
    graph = ModuleGraph(
        (ModuleNode("vision", (False,)), ModuleNode("audio", (True,)),
         ModuleNode("llm", (True,) * 3)), edges,
    )
    profile = CostProfile({
        n.name: (LayerCost(1, 1, 1, 4, 4, 1),) * n.num_layers for n in graph.nodes
    })
    return StageSpace(graph, profile, ranks=4, num_microbatches=2)


def test_models_without_these_layouts() -> None:
    tower = two_encoders((("vision", "audio"), ("audio", "llm")))
    both = two_encoders((("vision", "audio"), ("vision", "llm"), ("audio", "llm")))
    for space in (tower, both):
        for make in (lambda s: colocated(s, 1, 2), lambda s: replicated(s, 2)):
            with pytest.raises(NoPlanError, match="feed 'llm' only; 'vision' does not"):
                make(space)
    alone = StageSpace(
        ModuleGraph((ModuleNode("llm", (True,)),), ()),
        CostProfile({"llm": (LayerCost(1, 1, 1),)}), 1, 1,
    )
    with pytest.raises(NoPlanError, match="models with encoders; there are none"):
        colocated(alone, 1, 1)


@pytest.mark.parametrize("ranks", [0, 4])
def test_rank_counts_without_these_layouts(ranks: int) -> None:
    space = two_encoders((("vision", "llm"), ("audio", "llm")))
    for make in (lambda: colocated(space, 1, ranks), lambda: replicated(space, ranks)):
        with pytest.raises(NoPlanError, match=f"'llm' cannot have {ranks} stages; it has 3"):
            make()


def test_impossible_numbers() -> None:
    space = two_encoders((("vision", "llm"), ("audio", "llm")))
    with pytest.raises(NoPlanError, match="encoder_ranks is 0; it must be at least 1"):
        colocated(space, 0, 2)
    for chunks in (0, 1):
        with pytest.raises(NoPlanError, match=f"chunks is {chunks}; it must be at least 2"):
            chunked(space, {"vision": 1, "audio": 1, "llm": 2}, chunks)
    with pytest.raises(NoPlanError, match="'llm' cannot have 4 stages"):
        chunked(space, {"vision": 1, "audio": 1, "llm": 4}, 2)


def test_replicas_are_not_needed_for_text() -> None:
    plan = replicated(two_encoders((("vision", "llm"), ("audio", "llm"))), 3)
    program = lower(plan, [[], ["audio"]])
    ran = {i.stage for rank in program for i in rank if i.op is not Op.RECV}
    assert {stage for stage in ran if stage.module != "llm"} == {StageId("audio", 0, 1)}
