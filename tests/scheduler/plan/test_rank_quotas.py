"""Quotas of modules that share a rank: rejections, groups of tasks, and their times."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import InternalError, PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS, Instruction, Op, Program
from raymm.scheduler.program.timeline import Span, Timeline, chrome_trace
from raymm.scheduler.schedule.lower import full_program, iteration_time, lower
from raymm.scheduler.schedule.memory import activation_peaks, peak_bytes
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedules.base import Task
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.random_plans import costs_of, plans, profiled_plans, steps

# Random plans, each scheduled several times.

F, B = Op.FORWARD, Op.BACKWARD
HALVES = {"vision": 0.5, "audio": 0.5}


def colocated(quotas=HALVES, frozen=(), microbatches=4, recompute=False, schedule="1f1b") -> Plan:
    """Return two one-stage encoders on rank 0, and a two-stage language model on 1 and 2."""
    graph = ModuleGraph(
        tuple(
            ModuleNode(name, (name not in frozen,) * layers)
            for name, layers in (("vision", 1), ("audio", 1), ("llm", 2))
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = (
        *(Stage(n, 0, (0, 1), 0, quota=quotas.get(n), recompute=recompute)
          for n in ("vision", "audio")),
        Stage("llm", 0, (0, 1), 1), Stage("llm", 1, (1, 2), 2),
    )  # fmt: skip
    return Plan(graph, stages, microbatches, schedule)


def slots_of(program: Program, rank: int = 0) -> list[list[Instruction]]:
    found: dict[int, list[Instruction]] = {}
    for one in program.ranks[rank]:
        if one.group >= 0:
            found.setdefault(one.group, []).append(one)
    return list(found.values())


# -- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quotas", "why"),
    [
        ({"vision": 0.7, "audio": 0.4}, r"rank 0 sum to 1\.1; accepted: at most 1"),
        ({"vision": 0.5}, r"quota of stage vision\.0 is 0\.5, and no other module has one on rank"),
        ({"vision": 0, "audio": 0.4}, r"quota of stage vision\.0 is 0; accepted: a share"),
        ({"vision": float("nan"), "audio": 0.4}, "is nan; accepted: a share"),
        ({"vision": True, "audio": 0.4}, "is True; accepted: a share"),
        ({"vision": "half", "audio": 0.4}, "is 'half'; accepted: a share"),
    ],
)
def test_quotas_that_no_device_has_are_refused(quotas, why):
    with pytest.raises(PlanError, match=why):
        colocated(quotas)


def test_quotas_are_of_modules_on_ranks_of_one_process():
    plan = colocated()
    with pytest.raises(PlanError, match=r"quota of stage vision\.0 is 0\.5 and its tp 2; accepted"):
        replace(plan, stages=tuple(replace(s, tp=2) for s in plan.stages))
    graph = ModuleGraph((ModuleNode("a", (True,) * 2), ModuleNode("b", (True,))), (("a", "b"),))
    stages = (Stage("a", 0, (0, 1), 0, quota=0.3), Stage("a", 1, (1, 2), 0, quota=0.4),
              Stage("b", 0, (0, 1), 0, quota=0.3))  # fmt: skip
    with pytest.raises(PlanError, match=r"a\.1 is 0\.4 and of a\.0 0\.3; all stages of"):
        Plan(graph, stages, 2)


def test_a_plan_file_keeps_quotas_and_an_old_one_has_none():
    plan = colocated({"vision": 0.3, "audio": 0.6})
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.quota_sets(0) == ({"vision": 0.3, "audio": 0.6},) and plan.quota_sets(1) == ()
    data = json.loads(plan.to_json())
    for stage in data["stages"]:
        del stage["quota"]  # as in older files
    assert Plan.from_dict(data) == colocated({})
    data["stages"][0]["quota"] = "0.5"
    with pytest.raises(PlanError, match=r"quota of stage vision\.0 is '0\.5'"):
        Plan.from_dict(data)


# -- programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_all_work_of_both_encoders_is_concurrent(recompute):
    plan = colocated(recompute=recompute)
    program = full_program(plan)
    check_program(program)
    own = [i for i in program.ranks[0] if i.op in COMPUTE]
    assert all(i.group >= 0 and i.quota == 0.5 for i in own)
    for group in slots_of(program):
        assert {i.stage for i in group} == {StageId("vision", 0), StageId("audio", 0)}
        assert len({i.microbatch for i in group}) == 1  # the same, as both always have input
    assert all(i.group < 0 for rank in program.ranks[1:] for i in rank)


def test_tasks_alone_have_the_whole_device():
    """Check also the backward, which runs where its forward ran."""
    plan = colocated()
    present = [("vision", "audio"), ("vision",), ("vision", "audio"), ("audio",)]
    program = lower(plan, present)
    check_program(program)
    place = {(i.stage, i.microbatch, i.op): i for i in program.ranks[0] if i.op in COMPUTE}
    for op in (Op.FORWARD, Op.BACKWARD):
        assert place[StageId("vision", 0), 0, op].group >= 0
    for microbatch, modules in enumerate(present):
        for module in modules:
            forward = place[StageId(module, 0), microbatch, Op.FORWARD]
            backward = place[StageId(module, 0), microbatch, Op.BACKWARD]
            assert (forward.group >= 0) == (backward.group >= 0)


def test_a_single_modality_never_leaves_the_whole_device():
    program = lower(colocated(), [("vision",)] * 3)
    assert slots_of(program) == []
    assert program == lower(colocated({}), [("vision",)] * 3)


@st.composite
def with_quotas(draw: st.DrawFn, of_plans) -> Plan:
    """Draw a plan with quotas for modules on shared ranks that have at least two."""
    plan = draw(of_plans)
    stages = list(plan.stages)
    for rank in range(plan.num_ranks):
        modules = list(dict.fromkeys(s.module for s in plan.rank_stages(rank)))
        chosen = [m for m in modules if draw(st.booleans())]
        if len(chosen) < 2:
            continue
        share = draw(st.sampled_from([1, 0.5])) / len(chosen)
        stages = [
            replace(s, quota=share) if s.rank == rank and s.module in chosen else s
            for s in stages
        ]
    return replace(plan, stages=tuple(stages))


# A recomputation needs only kept inputs, and weight gradients only output gradients.
NEED_NOTHING_OF_OTHERS = {Op.RECOMPUTE, Op.BACKWARD_WEIGHT}


def check_groups_of(plan: Plan, program: Program) -> None:
    """Check the guarantees of a group, for each pair of instructions."""
    for rank in range(plan.num_ranks):
        for group in slots_of(program, rank):
            modules = [plan.by_id[i.stage].module for i in group]
            kinds = {"F" if i.op in FORWARDS else "W" if i.op is Op.BACKWARD_WEIGHT else "B"
                     for i in group if i.op is not Op.RECOMPUTE}  # fmt: skip
            assert len(kinds) <= 1
            for one, module in zip(group, modules, strict=True):
                assert one.quota == plan.by_id[one.stage].quota
                for other, its in zip(group, modules, strict=True):
                    if not {one.op, other.op} & NEED_NOTHING_OF_OTHERS and (
                        module != its and one.microbatch == other.microbatch
                    ):
                        edge = one.stage, other.stage
                        assert edge not in plan.stage_edges and edge[::-1] not in plan.stage_edges


@given(st.data())
def test_programs_with_groups_do_all_the_work(data):
    plan, present = data.draw(steps(with_quotas(profiled_plans())))
    schedule = data.draw(st.sampled_from([s for s in SCHEDULES if s != "zero_bubble"]))
    plan = replace(plan, schedule=schedule)
    program = lower(plan, present)
    check_program(program)
    check_groups_of(plan, program)

    def work(program):
        return [sorted((i.op, i.stage, i.microbatch) for i in rank if i.op in COMPUTE)
                for rank in program.ranks]  # fmt: skip

    bare = replace(plan, stages=tuple(replace(s, quota=None) for s in plan.stages))
    assert work(program) == work(lower(bare, present))


@given(st.data())
def test_zero_bubble_with_groups(data):
    plan = replace(data.draw(with_quotas(profiled_plans())), schedule="zero_bubble")
    program = full_program(plan)
    check_program(program)
    check_groups_of(plan, program)


# -- time -----------------------------------------------------------------------------------


def test_a_group_takes_as_long_as_its_slowest_module():
    program = Program(((
        Instruction(Op.FORWARD_NO_GRAD, StageId("a", 0), 0, group=0, quota=0.25),
        Instruction(Op.FORWARD_NO_GRAD, StageId("b", 0), 0, group=0, quota=0.5),
        Instruction(Op.FORWARD_NO_GRAD, StageId("b", 1), 0, group=0, quota=0.5),
        Instruction(Op.FORWARD_NO_GRAD, StageId("a", 0), 1),
    ),))  # fmt: skip
    costs = {
        (name, Op.FORWARD_NO_GRAD): s
        for name, s in ((StageId("a", 0), 1), (StageId("b", 0), 1), (StageId("b", 1), 2))
    }
    timeline = simulate(program, costs)
    forward = "forward_no_grad"
    assert timeline.spans == (
        Span(0, forward, StageId("a", 0), 0, 0.0, 4.0, quota=0.25),
        Span(0, forward, StageId("b", 0), 0, 0.0, 2.0, quota=0.5),
        Span(0, forward, StageId("b", 1), 0, 2.0, 6.0, quota=0.5),
        Span(0, forward, StageId("a", 0), 1, 6.0, 7.0),
    )
    assert timeline.busy(0) == 7 and timeline.bubble(0) == 0
    assert timeline.costs() == costs  # measured times on quotas predict the same again
    assert simulate(program, timeline.costs()) == timeline
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(st.data())
def test_lowering_predicts_the_simulated_times(data):
    plan = data.draw(with_quotas(plans()))
    costs = data.draw(costs_of(plan))
    program = lower(plan, [[n.name for n in plan.graph.nodes]] * plan.num_microbatches, costs)
    assert iteration_time(plan, costs) == simulate(
        program, costs, posted=plan.posted_receives
    ).makespan


def test_modules_of_a_group_hold_memory_together():
    def sizes(activation, remade):
        return StageCost(0, 0, 0, activation_bytes=activation, remade_bytes=remade)

    of_stage = {StageId("a", 0): sizes(4, 1), StageId("b", 0): sizes(6, 2)}

    def tasks(*groups):
        return [
            Task(stage, 0, op, group)
            for op, group in zip((F, B), groups, strict=True) for stage in of_stage
        ]

    assert peak_bytes(tasks(0, 1), of_stage) == 4 + 6 + 1 + 2
    assert peak_bytes(tasks(0, -1), of_stage) == 4 + 6 + 1  # then 6 + 2
    program = Program((tuple(Instruction(t.op, t.stage, 0, group=t.group) for t in tasks(0, 1)),))
    assert activation_peaks(program, of_stage) == (13,)


# -- programs that cannot run ---------------------------------------------------------------

@pytest.mark.parametrize(
    ("instructions", "why"),
    [
        (
            [Instruction(F, StageId("a", 0), 0, group=0, quota=0.5),
             Instruction(F, StageId("b", 0), 0),
             Instruction(F, StageId("c", 0), 0, group=0, quota=0.5)],
            "is separated from the others of its group",
        ),
        (
            [Instruction(F, StageId("a", 0), 0, group=0, quota=0.6),
             Instruction(F, StageId("b", 0), 0, group=0, quota=0.5)],
            "raises the quotas of its group above 1",
        ),
        (
            [Instruction(Op.SEND, StageId("a", 0), 0, StageId("b", 0), group=0, quota=0.5)],
            "only compute instructions have groups",
        ),
        (
            [Instruction(F, StageId("a", 0), 0, group=0, quota=0.5),
             Instruction(B, StageId("a", 0), 0)],
            r"backward a\.0 #0 has another quota than forward a\.0 #0 \(group 0, quota 0\.5\)",
        ),
    ],
)  # fmt: skip
def test_groups_that_cannot_run_are_refused(instructions, why):
    with pytest.raises(InternalError, match=why):
        check_program(Program((tuple(instructions),)))


def test_backwards_of_a_pair_stay_a_pair():
    program = full_program(colocated())
    kinds = [{i.op for i in group} for group in slots_of(program)]
    assert sum(kind <= BACKWARDS for kind in kinds) == sum(kind <= FORWARDS for kind in kinds) == 4


# -- pictures -------------------------------------------------------------------------------


def test_a_trace_has_a_thread_per_concurrent_module():
    plan = colocated()
    costs = {(s.id, op): 1.0 for s in plan.stages for op in COMPUTE}
    timeline = simulate(full_program(plan), costs)
    events = chrome_trace([("predicted", timeline)])["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0] == "rank 0"
    beside = sorted(name for tid, name in names.items() if tid >= plan.num_ranks)
    assert beside == ["rank 0, audio on 0.5", "rank 0, vision on 0.5"]
    per_thread: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            start = event["ts"]
            per_thread.setdefault(event["tid"], []).append((start, start + event["dur"]))
    for spans in per_thread.values():
        for early, late in itertools.pairwise(sorted(spans)):
            assert early[1] <= late[0]  # Perfetto nests overlapping spans of one thread
