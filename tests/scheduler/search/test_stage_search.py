"""Stage searches equal an evaluation of every combination of stage counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.loosely_coupled import loosely_coupled
from benchmarks.baselines.pipelines import unaware_work
from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, has_backward, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.step_graph import full_step
from raymm.scheduler.search.module_degrees import make_plan
from raymm.scheduler.search.stage_memory import StageMemory
from raymm.scheduler.search.stage_search import Choice, joint_search
from raymm.scheduler.search.stage_space import StageSpace


def op_costs(plan: Plan) -> dict[tuple[str, Op], float]:
    """Return seconds per stage and op, from layer_work alone."""
    work = layer_work(plan.graph, plan.profile)
    costs: dict[tuple[str, Op], float] = {}
    for stage in plan.stages:
        layers = work[stage.module][slice(*stage.layers)]
        forward = sum(w.forward for w in layers)
        for op in (Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED, Op.RECOMPUTE):
            costs[stage.id, op] = forward
        costs[stage.id, Op.BACKWARD_INPUT] = sum(w.backward_input for w in layers)
        costs[stage.id, Op.BACKWARD_WEIGHT] = sum(w.backward_weight for w in layers)
        costs[stage.id, Op.BACKWARD] = sum(w.backward for w in layers)
    return costs


def iteration_time(plan: Plan) -> float:
    costs = op_costs(plan)
    program = lower(plan, full_step(plan), costs)
    return simulate(program, costs, posted=plan.posted_receives).makespan


def work_bound(plan: Plan) -> float:
    """Return the largest work of a rank, a lower bound."""
    costs = op_costs(plan)
    again = {s.id: costs[s.id, Op.RECOMPUTE] * s.recompute for s in plan.stages}
    return plan.num_microbatches * max(
        costs[s.id, Op.FORWARD] + again[s.id] + costs[s.id, Op.BACKWARD] for s in plan.stages
    )


def exhaustive_search(
    space: StageSpace,
    evaluate: Callable[[Plan], float],
    fits: Callable[[Plan], bool] = lambda _: True,
) -> list[Choice]:
    """Return every combination of stage counts, fastest first."""
    modules = [node.name for node in space.graph.nodes]
    most = [min(node.num_layers, space.max_stages or 99) for node in space.graph.nodes]
    evaluated = []
    for chosen in itertools.product(*(range(1, n + 1) for n in most)):
        if sum(chosen) <= space.ranks:
            counts = dict(zip(modules, chosen, strict=True))
            try:
                plan = space.plan(counts)
            except NoPlanError:
                continue
            if fits(plan):
                evaluated.append(Choice(counts, plan, evaluate(plan)))
    return sorted(evaluated, key=lambda choice: choice.seconds)


@st.composite
def spaces(draw: st.DrawFn, schedules: tuple[str, ...] = ("1f1b",)) -> StageSpace:
    """Draw one to three encoders into an LLM, perhaps through a joining module; random flags."""
    encoders = [f"encoder{i}" for i in range(draw(st.integers(1, 3)))]
    join = draw(st.booleans()) and len(encoders) > 1
    names = [*encoders, *(["join"] if join else []), "llm"]
    edges = [(name, "join" if join and i < 2 else "llm") for i, name in enumerate(encoders)]
    edges += [("join", "llm")] if join else []
    times = draw(
        st.sampled_from([st.integers(0, 9), st.floats(0, 9, allow_subnormal=False)])
    )
    layer = st.builds(
        LayerCost, times, times, times, activation_bytes=st.integers(0, 9)
    )
    nodes, modules = [], {}
    for name in names:
        size = draw(st.integers(1, 5 if name == "llm" else 3))
        flags = draw(
            st.one_of(
                st.just([False] * size),
                st.just([False] * (size - 1) + [True]),
                st.lists(st.booleans(), min_size=size, max_size=size),
            )
        )
        nodes.append(ModuleNode(name, tuple(flags)))
        modules[name] = tuple(draw(layer) for _ in range(size))
    return StageSpace(
        ModuleGraph(tuple(nodes), tuple(edges)),
        CostProfile(modules),
        ranks=draw(st.integers(len(names), 8)),
        num_microbatches=draw(st.integers(1, 5)),
        schedule=draw(st.sampled_from(schedules)),
        recompute=draw(st.booleans()),
        max_stages=draw(st.sampled_from([None, 2, 3])),
    )


def depth_limit(space: StageSpace, budget: int):
    """Return (memory, fits): activations of as many microbatches as a stage has depth."""

    def need(module: str, lo: int, hi: int, depth: int) -> int:
        layers = space.profile.modules[module][lo:hi]
        return min(depth, space.num_microbatches) * sum(c.activation_bytes for c in layers)

    class Memory(StageMemory):
        def added(self, module: str, stages: int, beyond: int) -> np.ndarray:
            size = space.graph.node(module).num_layers + 1
            found = np.zeros((stages, size, size))
            for index, lo, hi in np.ndindex(found.shape):
                if need(module, lo, hi, stages - index + beyond) > budget:
                    found[index, lo, hi] = np.inf
            return found

        def refine(self, *_: object) -> bool:
            return False

        def options(self, module: str, ranges: tuple, beyond: int) -> list[tuple[str, ...]]:
            return [()] * len(ranges)

    def fits(plan: Plan) -> bool:
        return all(need(s.module, *s.layers, plan.depth[s.id]) <= budget for s in plan.stages)

    return Memory({}, {}), fits


def with_memory(space: StageSpace, memory: StageMemory) -> StageSpace:
    return StageSpace(
        space.graph, space.profile, space.ranks, space.num_microbatches,
        recompute=space.recompute, max_stages=space.max_stages, memory=memory,
    )


def check(space: StageSpace, fits=lambda plan: True, **options) -> None:
    expected = exhaustive_search(space, iteration_time, fits)
    if not expected:
        for search in (joint_search, loosely_coupled):
            with pytest.raises(NoPlanError, match="no plan found with at most"):
                search(space, iteration_time, fits=fits)
        return
    found = joint_search(space, iteration_time, fits=fits, alternatives=3, **options)
    chosen = [found.best, *found.alternatives]
    assert [c.seconds for c in chosen] == pytest.approx(
        [c.seconds for c in expected[:4]], rel=1e-8
    )
    assert found.simulated <= len(expected) <= found.combinations
    assert len({tuple(c.counts.items()) for c in chosen}) == len(chosen)
    for choice in chosen:
        assert sum(choice.counts.values()) == choice.plan.num_ranks <= space.ranks
        assert fits(choice.plan) and choice.seconds == iteration_time(choice.plan)
        assert choice.plan == space.plan(choice.counts)
        for module, count in choice.counts.items():
            assert len(choice.plan.module_stages(module)) == count
            assert space.max_stages is None or count <= space.max_stages
    for relax in (False, True):
        try:
            loose = loosely_coupled(space, iteration_time, fits, relax=relax)
        except NoPlanError:
            continue
        assert found.best.seconds <= loose.best.seconds * (1 + 1e-8)
        assert loose.best.plan.num_ranks <= space.ranks and fits(loose.best.plan)


@given(spaces(), st.sampled_from([None, work_bound]), st.booleans())
def test_joint_search_equals_brute_force(space, bound, trust):
    check(space, lower_bound=bound, profile_bound=trust)


@given(spaces(), st.integers(0, 60))
def test_under_a_memory_limit(space, budget):
    memory, fits = depth_limit(space, budget)
    check(space, fits)  # partitions made without the limit, plans evaluated with it
    check(with_memory(space, memory), fits)
    # Partitions made with the limit fit by themselves.
    for choice in exhaustive_search(with_memory(space, memory), lambda plan: 0.0):
        assert fits(choice.plan)


@given(spaces(schedules=("1f1b", "zero_bubble", "gpipe")))
def test_no_schedule_undercuts_the_bound(space):
    for counts in itertools.islice(space.combinations(), 8):
        plan = space.plan(counts)
        seconds = iteration_time(plan)
        beyond = {m: space.beyond(m, counts) for m in counts}
        assert max(space.lower_bound(m, n, beyond[m]) for m, n in counts.items()) <= seconds


@given(spaces())
def test_partitions_balance_the_executed_work(space):
    work = layer_work(space.graph, space.profile)
    for counts in itertools.islice(space.combinations(), 8):
        plan = space.plan(counts)
        costs = op_costs(plan)
        for module, count in counts.items():
            stages = plan.module_stages(module)
            times = [
                sum(w.total for w in work[module][slice(*s.layers)])
                + s.recompute * costs[s.id, Op.RECOMPUTE]
                for s in stages
            ]
            assert space.bottleneck(module, count) == pytest.approx(max(times))


def vision_and_llm(trainable: bool = False) -> tuple[ModuleGraph, CostProfile]:
    """Return a frozen encoder with a trainable projector, into an LLM."""
    graph = ModuleGraph(
        (
            ModuleNode("vision", (False,) * 4 + (True,), projector=True),
            ModuleNode("llm", (trainable,) * 6),
        ),
        (("vision", "llm"),),
    )
    layer = LayerCost(1.0, 1.0, 1.0)
    return graph, CostProfile({"vision": (layer,) * 5, "llm": (layer,) * 6})


def test_only_stages_with_a_full_backward_recompute():
    graph, profile = vision_and_llm()
    assert has_backward(graph)["vision"] == (False,) * 4 + (True,)
    partitions = {"vision": ((0, 4), (4, 5)), "llm": ((0, 3), (3, 6))}
    plan = make_plan(graph, partitions, 4, profile=profile, recompute=True)
    assert [(s.id, s.rank, s.recompute) for s in plan.stages] == [
        (StageId("vision", 0), 0, False),
        (StageId("vision", 1), 1, True),
        (StageId("llm", 0), 2, True),
        (StageId("llm", 1), 3, False),  # the loss's stage needs its activations at once
    ]
    again = make_plan(graph, partitions, 4, recompute=True, recompute_loss=True)
    assert again.by_id[StageId("llm", 1)].recompute
    mixed = make_plan(
        graph, {"vision": ((0, 5),), "llm": ((0, 6),)}, 4, recompute=True, recompute_loss=True
    )
    assert [s.recompute for s in mixed.stages] == [False, True]
    assert not any(s.recompute for s in make_plan(graph, partitions, 4).stages)
    with pytest.raises(PlanError, match="'llm' has no stage"):
        make_plan(graph, {"vision": ((0, 5),)}, 4)


def test_a_frozen_encoder_gets_few_stages():
    graph, profile = vision_and_llm()
    space = StageSpace(graph, profile, ranks=4, num_microbatches=32)
    # 5 s of forward and 1 s of backward against 6 times 2 s: 1 and 3 ranks (6 s, 4 s).
    result = joint_search(space, iteration_time)
    assert result.best.counts == {"vision": 1, "llm": 3}
    assert result.best.plan.module_stages("llm")[1].layers == (2, 4)
    # A planner that assumes all modules are trained sees 15 s against 18 s.
    unaware = StageSpace(
        graph, profile, ranks=4, num_microbatches=32, expected=unaware_work(graph, profile)
    )
    assert unaware.bottleneck("vision", 1) == 15 and unaware.bottleneck("llm", 3) == 6
    assert unaware.lower_bound("vision", 1) == space.lower_bound("vision", 1)


def test_loosely_coupled_keeps_the_pace_of_the_llm():
    names = ("vision", "audio", "llm")
    graph = ModuleGraph(
        tuple(ModuleNode(n, (False,) * 12) for n in names), (("vision", "llm"), ("audio", "llm"))
    )
    weights = {"vision": 2.0, "audio": 1.0, "llm": 1.0}
    profile = CostProfile(
        {n: (LayerCost(weight, 0.0, 0.0),) * 12 for n, weight in weights.items()}
    )

    def plans(ranks: int, relax: bool) -> list[dict[str, int]]:
        space = StageSpace(graph, profile, ranks=ranks, num_microbatches=4)
        found = loosely_coupled(space, iteration_time, alternatives=99, relax=relax)
        counts = [found.best.counts, *(c.counts for c in found.alternatives)]
        return sorted(counts, key=lambda c: c["llm"])

    # LLM stages of 12, 6 and 4 s; vision has 24 s, audio 12 s.
    kept = [
        {"vision": 2, "audio": 1, "llm": 1},
        {"vision": 4, "audio": 2, "llm": 2},
        {"vision": 6, "audio": 3, "llm": 3},
    ]
    assert plans(16, relax=False)[:3] == plans(16, relax=True)[:3] == kept
    # With 8 ranks, 3 for the LLM leave 5: vision slows down to 8 s, audio to 6 s.
    assert plans(8, relax=True)[:3] == [*kept[:2], {"vision": 3, "audio": 2, "llm": 3}]
    assert [c["llm"] for c in plans(8, relax=False)] == [1, 2, 6]


def test_alternatives_include_the_losing_plans():
    graph, profile = vision_and_llm(trainable=True)
    space = StageSpace(graph, profile, ranks=5, num_microbatches=8)
    result = joint_search(space, iteration_time, alternatives=2)
    every = exhaustive_search(space, iteration_time)
    assert len(result.alternatives) == 2 and result.combinations == len(every) == 10
    assert [c.seconds for c in result.alternatives] == [c.seconds for c in every[1:3]]
    alone = joint_search(space, iteration_time, alternatives=0)
    assert alone.alternatives == () and alone.best.seconds == every[0].seconds
    assert alone.simulated <= result.simulated < result.combinations


def test_most_combinations_are_never_simulated():
    layer = LayerCost(1.0, 1.0, 1.0)
    graph = ModuleGraph(
        (
            ModuleNode("vision", (False,) * 8),
            ModuleNode("audio", (False,) * 7 + (True,)),
            ModuleNode("llm", (True,) * 12),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    profile = CostProfile({n.name: (layer,) * n.num_layers for n in graph.nodes})
    space = StageSpace(graph, profile, ranks=10, num_microbatches=8)
    result = joint_search(space, iteration_time, alternatives=0)
    assert result.combinations == math.comb(10, 3)
    assert result.simulated < result.combinations / 4
    assert result.best.seconds == exhaustive_search(space, iteration_time)[0].seconds


def test_cut_costs_move_cuts():
    graph, profile = vision_and_llm()
    space = StageSpace(
        graph, profile, ranks=3, num_microbatches=2, cut_costs={"llm": [0, 0, 0, 9, 0, 0]}
    )
    assert space.partition("llm", 2) in (((0, 2), (2, 6)), ((0, 4), (4, 6)))


def test_impossible_budgets_are_refused():
    graph, profile = vision_and_llm()
    with pytest.raises(NoPlanError, match="ranks is 1; 2 modules need"):
        StageSpace(graph, profile, ranks=1, num_microbatches=2)
    with pytest.raises(NoPlanError, match="max_stages is 0"):
        StageSpace(graph, profile, ranks=2, num_microbatches=2, max_stages=0)
    with pytest.raises(PlanError, match="lacks module"):
        StageSpace(graph, CostProfile({}), ranks=2, num_microbatches=2)
    with pytest.raises(PlanError, match="expected has 0 layers of 'vision'"):
        StageSpace(graph, profile, ranks=2, num_microbatches=2, expected={})
    space = StageSpace(graph, profile, ranks=4, num_microbatches=2)
    for count in (0, 7):
        with pytest.raises(NoPlanError, match=f"'llm' cannot have {count} stages"):
            space.plan({"vision": 1, "llm": count})
    with pytest.raises(NoPlanError, match="fits in memory"):
        joint_search(space, iteration_time, fits=lambda plan: False)
