"""Groups of microbatches: refusals, proof, time and memory."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, Op, Program
from raymm.scheduler.schedule.lower import full_program, lower, one_f_one_b_limits
from raymm.scheduler.schedule.memory import activation_peaks, rank_memory
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs


def plan_of(
    factors: dict[str, int], microbatches: int = 4, edges=(("a", "llm"), ("b", "llm")),
    schedule: str = "1f1b", trains: bool = True, dp: int = 1,
) -> Plan:
    """Return a plan of one stage per module and replica; only the last module has a loss."""
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    nodes = tuple(
        ModuleNode(name, (trains or name == "llm",), False, name == "llm") for name in names
    )
    stages, rank = [], 0
    for name in names:
        for replica in range(dp if name in factors else 1):
            stages.append(Stage(
                name, 0, (0, 1), rank, replica, microbatch_factor=factors.get(name, 1)
            ))
            rank += 1
    return Plan(ModuleGraph(nodes, tuple(edges)), tuple(stages), microbatches, schedule)


@pytest.mark.parametrize(("changes", "accepted"), [
    ({"factors": {"llm": 2}}, "without inputs"),
    ({"factors": {"a": 3}}, "that factor \\* dp divides"),
    ({"factors": {"a": 2}, "dp": 4}, "that factor \\* dp divides"),
    ({"factors": {"a": 0}}, "microbatch_factor"),
])
def test_unsupported_factors(changes, accepted):
    with pytest.raises(PlanError, match=accepted):
        plan_of(**changes)


@pytest.mark.parametrize(("field", "value", "accepted"), [
    ("recompute", True, "recompute_layers"), ("split", "samples", "split 'microbatches'"),
])
def test_unsupported_layouts(field, value, accepted):
    plan = plan_of({"a": 2})
    first = replace(plan.stages[0], **{field: value})
    with pytest.raises(PlanError, match=f"microbatch_factor of 'a' is 2.*{accepted}"):
        replace(plan, stages=(first, *plan.stages[1:]))


def test_replicas_have_one_factor():
    plan = plan_of({"a": 2}, dp=2)
    first = replace(plan.stages[0], microbatch_factor=1)
    with pytest.raises(PlanError, match="differs between stages of 'a'"):
        replace(plan, stages=(first, *plan.stages[1:]))


@pytest.mark.parametrize(("schedule", "first", "last", "accepted"), [
    ("slots", {"slot": 0}, {"slot": 1}, "another schedule"),
    ("1f1b", {"quota": 0.5, "rank": 0}, {"rank": 1}, "no quota"),
])
def test_modules_that_run_concurrently_are_refused(schedule, first, last, accepted):
    plan = plan_of({"a": 2})
    stages = tuple(
        replace(stage, **(last if stage.module == "llm" else first)) for stage in plan.stages
    )
    with pytest.raises(PlanError, match=f"microbatch_factor of 'a' is 2.*{accepted}"):
        shared = (0,) if schedule == "1f1b" else ()
        replace(plan, stages=stages, schedule=schedule, shared_ranks=shared)


def test_a_loss_cannot_be_shared():
    with pytest.raises(PlanError, match="without loss"):
        node = ModuleNode("a", (True,), False, True)
        Plan(ModuleGraph((node,), ()), (Stage("a", 0, (0, 1), 0, microbatch_factor=2),), 4)


def test_several_stages_are_refused():
    plan = plan_of({})
    nodes = tuple(replace(n, trainable=(True, True)) if n.name == "a" else n
                  for n in plan.graph.nodes)
    stages = [Stage("a", i, (i, i + 1), r, microbatch_factor=2) for i, r in ((0, 0), (1, 3))]
    with pytest.raises(PlanError, match="pp 1"):
        Plan(replace(plan.graph, nodes=nodes), (*stages, *plan.stages[1:]), 4)


def test_plans_keep_factors_in_files():
    plan = plan_of({"a": 2})
    assert Plan.from_json(plan.to_json()) == plan
    assert group_spans(plan) == {plan.stages[0].id: 2}


@st.composite
def steps(draw) -> tuple[Plan, Program, Program]:
    """Return a plan with factors, and the programs of a step in which some microbatches lack
    modules, under the plan's schedule and under 1F1B."""
    sources = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
    middle = [f"m{i}" for i in range(draw(st.integers(0, 2)))]
    edges = [(s, m) for s, m in product(sources, middle) if draw(st.booleans())]
    edges += [(m, "llm") for m in middle if any(e[1] == m for e in edges)]
    edges += [(s, "llm") for s in sources if not any(e[0] == s for e in edges)]
    trains, number = draw(st.booleans()), st.integers(1, 9)
    schedules = ["1f1b", "gpipe", "megatron", "dip", "entrain", "bigmac", "zero_bubble"]
    schedule = draw(st.sampled_from(schedules))
    factors = {s: draw(st.sampled_from([1, 2, 4])) for s in sources}
    plan = plan_of(factors, 8, edges, schedule, trains, draw(st.integers(1, 2)))
    layer = st.builds(LayerCost, number, number, number, number, st.just(0), st.just(0))
    profile = CostProfile({node.name: (draw(layer),) for node in plan.graph.nodes})
    plan = replace(plan, profile=profile)
    present = [[s for s in sources if draw(st.integers(0, 4))] for _ in range(8)]
    program = lower(plan, present)
    without = tuple(replace(stage, microbatch_factor=1) for stage in plan.stages)
    assert program == lower(replace(plan, stages=without), present)
    baseline = lower(replace(plan, schedule="1f1b"), present)
    return plan, program, baseline


@given(steps())
def test_random_graphs_are_proven_and_keep_their_work(step):
    """Programs do not depend on factors and end; every group runs once, in the same total time."""
    plan, program, baseline = step
    costs, sizes = op_seconds(plan), stage_costs(plan)
    check_program(program)
    spans = group_spans(plan)
    spent = [dict.fromkeys((s.id for s in plan.stages), 0.0) for _ in range(2)]
    ran: Counter = Counter()
    for seconds, timeline in zip(
        spent, (simulate(program, costs), simulate(program, costs, spans=spans)), strict=True
    ):
        for span in timeline.compute():
            seconds[span.stage] += span.end - span.start
    for span in timeline.compute():
        if span.stage in spans and span.end > span.start:
            ran[span.stage, span.op, span.microbatch // spans[span.stage]] += 1
    assert spent[1] == pytest.approx(spent[0])
    groups = {
        (i.stage, i.op, i.microbatch // spans[i.stage])
        for rank in program.ranks for i in rank if i.op in COMPUTE and i.stage in spans
    }
    assert ran == dict.fromkeys(groups, 1)
    peaks = activation_peaks(program, sizes, spans)
    assert peaks == tuple(slow_peak(rank, sizes, spans) for rank in program.ranks)
    if plan.schedule == "zero_bubble":
        limits = one_f_one_b_limits(plan, baseline, sizes)
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def slow_peak(rank, sizes, spans) -> int:
    """Count the microbatches of all groups that have begun and not ended, task by task."""
    tasks = [i for i in rank if i.op in COMPUTE]
    group = lambda i: (i.stage, i.microbatch // spans.get(i.stage, 1))  # noqa: E731
    peak = 0
    for now in range(len(tasks)):
        held = 0
        for key in {group(i) for i in tasks}:
            forwards = [n for n, i in enumerate(tasks) if group(i) == key and i.op is Op.FORWARD]
            ends = [n for n, i in enumerate(tasks) if group(i) == key and i.op in BACKWARDS]
            if forwards and forwards[0] <= now <= ends[-1]:
                held += len(forwards) * sizes[key[0]].activation_bytes
        peak = max(peak, held)
    return peak


def test_memory_has_the_activations_of_a_group():
    layer = LayerCost(1.0, 1.0, 1.0, activation_bytes=100, parameter_bytes=4, output_bytes=10)
    peaks = {}
    for factor in (1, 2, 4):
        plan = plan_of({"a": factor}, 8, edges=(("a", "llm"),))
        plan = replace(plan, profile=CostProfile({"a": (layer,), "llm": (layer,)}))
        peaks[factor] = rank_memory(plan, full_program(plan))[0].activations
    assert peaks == {1: 220, 2: 440, 4: 880}  # two groups of 100 + 10 per microbatch in flight


def test_a_group_waits_for_nothing_but_its_own_data():
    """With gpipe, a factor of all microbatches delays the first message by all forwards."""
    plan = plan_of({"a": 4}, edges=(("a", "llm"),), schedule="gpipe")
    costs = {(s.id, op): 1.0 for s in plan.stages for op in COMPUTE}
    program = full_program(plan)
    spans = [s for s in simulate(program, costs, spans=group_spans(plan)).compute()]
    first = min(s.start for s in spans if s.stage.module == "llm")
    assert first == 4.0
    assert max(s.end for s in spans) == 4.0 + 4.0 + 4.0 + 4.0


def test_a_factor_shortens_steps_with_expensive_calls():
    """Simulate an encoder of 4 layers and width 64, measured on one core: milliseconds of a forward
    and a backward for the images of 1, 2 and 4 microbatches, before a language model."""
    calls = {1: (3.1, 2.5), 2: (3.1, 2.5), 4: (3.6, 2.9)}
    steps = {}
    for factor, (forward, backward) in calls.items():
        plan = plan_of({"a": factor}, 16, edges=(("a", "llm"),))
        vision, llm = (stage.id for stage in plan.stages)
        costs = {
            (vision, Op.FORWARD): forward / factor, (vision, Op.BACKWARD): backward / factor,
            (llm, Op.FORWARD): 1.0, (llm, Op.BACKWARD): 2.0,
        }
        timeline = simulate(full_program(plan), costs, spans=group_spans(plan))
        steps[factor] = round(timeline.makespan, 1)
    assert steps == {1: 90.1, 2: 54.3, 4: 56.3}  # the language model alone takes 48
