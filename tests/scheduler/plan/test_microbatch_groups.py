"""Groups of microbatches: refusals, proof, time and memory."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import COMPUTE, Op
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import StageCost


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
    ({"factors": {"a": 2}, "schedule": "zero_bubble"}, "1f1b, or a frozen module"),
    ({"factors": {"a": 0}}, "microbatch_factor"),
])
def test_unsupported_factors(changes, accepted):
    with pytest.raises(PlanError, match=accepted):
        plan_of(**changes)


@pytest.mark.parametrize(("field", "value", "accepted"), [
    ("tp", 2, "tp 1"), ("cp", 2, "cp 1"), ("recompute", True, "recompute_layers"),
    ("split", "samples", "split 'microbatches'"), ("sharding", "fsdp", "none or zero1"),
])
def test_unsupported_layouts(field, value, accepted):
    plan = plan_of({"a": 2})
    first = replace(plan.stages[0], **{field: value})
    with pytest.raises(PlanError, match=f"microbatch_factor of 'a' is 2.*{accepted}"):
        replace(plan, stages=(first, *plan.stages[1:]))


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


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_are_proven_and_keep_their_work(seed):
    """Programs do not depend on factors; total time and final memory are those without."""
    rng = np.random.default_rng(seed)
    sources = [f"s{i}" for i in range(rng.integers(1, 4))]
    middle = [f"m{i}" for i in range(rng.integers(0, 3))]
    edges = [(s, m) for s, m in product(sources, middle) if rng.random() < 0.5]
    edges += [(m, "llm") for m in middle if any(e[1] == m for e in edges)]
    edges += [(s, "llm") for s in sources if not any(e[0] == s for e in edges)]
    schedule = str(rng.choice(["1f1b", "gpipe", "megatron", "dip", "entrain", "bigmac"]))
    dp = int(rng.integers(1, 3))
    factors = {s: int(rng.choice([1, 2, 4])) for s in sources}
    plan = plan_of(factors, 8, edges, schedule, dp=dp)
    present = [[s for s in sources if rng.random() < 0.8] for _ in range(8)]
    program = lower(plan, present)
    check_program(program)
    assert program == lower(plan_of(dict.fromkeys(factors, 1), 8, edges, schedule, dp=dp), present)

    costs = {(s.id, op): float(rng.integers(1, 9)) for s in plan.stages for op in COMPUTE}
    spans = group_spans(plan)
    timeline = simulate(program, costs, spans=spans)
    spent = {s.id: [0.0, 0.0] for s in plan.stages}
    for span in simulate(program, costs).compute():
        spent[span.stage][0] += span.end - span.start
    busy: dict = {}
    for span in timeline.compute():
        spent[span.stage][1] += span.end - span.start
        if span.stage in spans and span.end > span.start:
            key = span.stage, span.op, span.microbatch // spans[span.stage]
            busy[key] = busy.get(key, 0) + 1
    assert all(before == pytest.approx(after) for before, after in spent.values())
    assert set(busy.values()) <= {1}  # one forward and one backward per group

    sizes = {s.id: StageCost(0, 0, 0, activation_bytes=int(rng.integers(1, 9)))
             for s in plan.stages}
    assert activation_peaks(program, sizes, spans) == tuple(
        slow_peak(rank, sizes, spans) for rank in program.ranks
    )


def slow_peak(rank, sizes, spans) -> int:
    """Count the microbatches of all groups that have begun and not ended, task by task."""
    tasks = [i for i in rank if i.op in COMPUTE]
    group = lambda i: (i.stage, i.microbatch // spans.get(i.stage, 1))  # noqa: E731
    peak = 0
    for now in range(len(tasks)):
        held = 0
        for key in {group(i) for i in tasks}:
            forwards = [n for n, i in enumerate(tasks) if group(i) == key and i.op is Op.FORWARD]
            ends = [n for n, i in enumerate(tasks) if group(i) == key and i.op is Op.BACKWARD]
            if forwards and forwards[0] <= now <= ends[-1]:
                held += len(forwards) * sizes[key[0]].activation_bytes
        peak = max(peak, held)
    return peak


def test_a_group_waits_for_nothing_but_its_own_data():
    """With gpipe, a factor of all microbatches delays the first message by all forwards."""
    plan = plan_of({"a": 4}, edges=(("a", "llm"),), schedule="gpipe")
    costs = {(s.id, op): 1.0 for s in plan.stages for op in COMPUTE}
    program = full_program(plan)
    spans = [s for s in simulate(program, costs, spans=group_spans(plan)).compute()]
    first = min(s.start for s in spans if s.stage.module == "llm")
    assert first == 4.0
    assert max(s.end for s in spans) == 4.0 + 4.0 + 4.0 + 4.0
