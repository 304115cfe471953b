"""Pure parts of the benchmark: the papers' rows as plans, and sleeping stages."""

import pytest
import torch

from benchmarks.baselines.pipelines import unaware_work
from benchmarks.devices import sleeping_stages
from benchmarks.devices.sleeping_stages import (
    Overheads,
    Renaming,
    SleepingPipeline,
    SleepingStage,
    chain_plan,
    message_seconds,
    ready_receives,
)
from benchmarks.predicted_vs_measured import Run, plans_of
from benchmarks.shared.paper_rows import (
    ENCODER,
    LLM,
    MAX_STAGES,
    ROWS,
    layer_profile,
    mismatch,
    own_plan,
    same_totals,
    scale_of,
    table_plan,
)
from raymm.actors.executor.split_backward import backward_input
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import Instruction, Op, Program
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import StageCost, op_seconds, stage_costs

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_stage_counts_are_those_the_times_imply(row):
    assert row.aware.total == row.unaware.total <= MAX_STAGES
    least = min(mismatch(row, *pair) for pair in same_totals())
    assert mismatch(row, row.aware, row.unaware) == pytest.approx(least)


def test_the_papers_figures():
    assert len(ROWS) == 15
    assert BY_NAME["VLM-L"].paper_speedup == pytest.approx(1.53, abs=0.01)  # v1 §6.4
    assert max(row.paper_speedup for row in ROWS) == 2.46  # v2 §5.3


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_tables_plan_has_the_tables_costs(row, aware):
    plan = table_plan(row, 1e-3, aware, "1f1b")
    times, counts = row.variant(aware)
    costs = stage_costs(plan)
    assert len(costs) == counts.total == plan.num_ranks
    for i in range(counts.encoder):
        cost = costs[StageId(ENCODER, i)]
        assert cost.forward == pytest.approx(times.encoder_forward / 1e3)
        last = i + 1 == counts.encoder
        assert cost.backward_weight == pytest.approx(last * times.encoder_backward / 1e3)
        assert cost.backward_input == 0
    for i in range(counts.llm):
        cost = costs[StageId(LLM, i)]
        assert cost.forward == pytest.approx(times.llm_forward / 1e3)
        assert cost.backward_input == pytest.approx(times.llm_backward / 1e3)
        assert cost.backward_weight == 0


def test_trained_and_recomputing_variants():
    row = BY_NAME["VLM-M"]
    times = row.times[0]
    trained = stage_costs(table_plan(row, 1e-3, True, "zero_bubble", trainable=True))
    assert trained[StageId("llm", 0)].backward_weight == pytest.approx(times.llm_forward / 1e3)
    assert trained[StageId("encoder", 0)].backward_input == 0
    assert trained[StageId("encoder", 1)].backward_input == pytest.approx(
        times.encoder_forward / 1e3
    )
    plan = table_plan(row, 1e-3, True, "zero_bubble", recompute=True, microbatches=3)
    seconds = op_seconds(plan)
    whole = seconds[StageId("llm", 0), Op.RECOMPUTE] + seconds[StageId("llm", 0), Op.BACKWARD]
    assert whole == pytest.approx(times.llm_backward / 1e3)
    ops = {(i.stage, i.op) for rank in full_program(plan) for i in rank}
    assert (StageId("llm", 0), Op.RECOMPUTE) in ops
    assert (StageId("encoder", 2), Op.RECOMPUTE) not in ops
    assert (StageId("llm", 4), Op.RECOMPUTE) not in ops  # it would have no benefit


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_own_planners(row):
    scale = scale_of(row, 10.0)
    graph, profile = layer_profile(row, scale)
    bottleneck = {}
    for aware in (True, False):
        plan = own_plan(row, scale, aware)
        assert plan.num_ranks == row.aware.total
        costs = stage_costs(plan).values()
        bottleneck[aware] = max(c.forward + c.backward_input + c.backward_weight for c in costs)
    assert bottleneck[True] <= bottleneck[False] * (1 + 1e-9)
    # For the unaware planner, every backward is the same multiple of its forward.
    ratios = [
        work.backward / work.forward
        for works in unaware_work(graph, profile).values() for work in works if work.forward
    ]
    assert max(ratios) == pytest.approx(min(ratios))


def test_every_run_of_a_row_can_be_predicted():
    overheads = Overheads(1e-3, {Op.SEND: 2e-4, Op.RECV: 1e-4, Op.FORWARD: 3e-4})
    for name, plan in plans_of(BY_NAME["MMM"], 20.0).items():
        run = Run.of(name, plan, overheads)
        costs = stage_costs(plan).values()
        slowest = max(c.forward + c.backward_input + c.backward_weight for c in costs)
        assert run.expected.makespan > plan.num_microbatches * slowest
        run.timelines = [run.expected]
        assert run.error == 0
        assert run.error_without_overheads < 0
        assert run.to_dict()["measured_ms"] == pytest.approx(run.measured * 1e3, abs=0.01)


def test_a_plan_laid_on_the_last_ranks():
    plan = table_plan(BY_NAME["VLM-S"], 1e-3, False, "1f1b", microbatches=4)
    program = full_program(plan)
    chain = Renaming(plan, 9)
    moved = chain.program(program)
    check_program(moved)
    assert [len(rank) for rank in moved][:2] == [0, 0]
    assert {i.stage for i in moved.ranks[-1]} == {StageId("chain", 8)}
    costs = {(chain.names[stage], op): s for (stage, op), s in op_seconds(plan).items()}
    back = chain.timeline(simulate(moved, costs))
    assert sorted(back.spans) == sorted(simulate(program, op_seconds(plan)).spans)


@pytest.fixture
def pauses(monkeypatch):
    taken = []
    monkeypatch.setattr(sleeping_stages, "pause", taken.append)
    return taken


def run_stage(cost: StageCost, requires_grad: bool, last: bool = False):
    stage = SleepingStage(cost, 3, last)
    x = torch.ones(3, requires_grad=requires_grad)
    y = stage.run(None, {"a": Message((x,), {})}, MicrobatchContext(1)).outputs[0]
    return stage, x, y


def test_a_stage_sleeps_in_the_part_of_the_backward_that_costs(pauses):
    cost = StageCost(1.0, 2.0, 4.0)
    stage, x, y = run_stage(cost, True)
    assert pauses == [1.0]
    (gradient,), deferred = backward_input((y,), (torch.full((3,), 5.0),), (x,))
    assert pauses == [1.0, 2.0]
    assert gradient.tolist() == [5.0] * 3
    assert stage.weight.grad is None
    deferred.run()
    assert pauses == [1.0, 2.0, 4.0]
    assert stage.weight.grad.item() == 15.0
    pauses.clear()
    run_stage(cost, True, last=True)[2].backward()
    assert sorted(pauses) == [1.0, 2.0, 4.0]
    pauses.clear()
    run_stage(cost, False, last=True)[2].backward()  # nothing trainable before it
    assert pauses == [1.0, 4.0]


def test_a_frozen_stage_has_no_weight(pauses):
    stage, x, y = run_stage(StageCost(1.0, 2.0, 0.0), True)
    assert list(stage.parameters()) == []
    y.sum().backward()
    assert pauses == [1.0, 2.0]
    assert not run_stage(StageCost(1.0, 2.0, 0.0), False)[2].requires_grad


def test_overheads_of_ops_and_their_messages():
    program = Program(
        (
            (
                Instruction(Op.FORWARD, StageId("a", 0), 0),
                Instruction(Op.SEND, StageId("a", 0), 0, StageId("a", 1)),
                Instruction(Op.RECV, StageId("a", 0), 0, StageId("a", 1)),
                Instruction(Op.BACKWARD, StageId("a", 0), 0),
            ),
            (
                Instruction(Op.RECV, StageId("a", 1), 0, StageId("a", 0)),
                Instruction(Op.FORWARD, StageId("a", 1), 0),
                Instruction(Op.BACKWARD, StageId("a", 1), 0),
                Instruction(Op.SEND, StageId("a", 1), 0, StageId("a", 0)),
            ),
        )
    )
    per_op = {Op.FORWARD: 0.01, Op.BACKWARD: 0.02, Op.SEND: 0.1, Op.RECV: 0.3}
    overheads = Overheads(1.0, per_op)
    assert overheads.latency == pytest.approx(0.6)
    costs = {(StageId("a", 0), Op.FORWARD): 10.0, (StageId("a", 0), Op.BACKWARD): 20.0,
             (StageId("a", 1), Op.FORWARD): 30.0, (StageId("a", 1), Op.BACKWARD): 40.0}
    added = overheads.added_to(costs, program)
    assert added[StageId("a", 0), Op.FORWARD] == pytest.approx(10.11)
    assert added[StageId("a", 1), Op.FORWARD] == pytest.approx(30.31)
    assert added[StageId("a", 0), Op.BACKWARD] == pytest.approx(20.32)
    # Down and back: both messages take the measured time, including their ends.
    makespan = simulate(program, added, overheads.latency).makespan
    assert makespan == pytest.approx(100 + 2 * 0.01 + 2 * 0.02 + 2 * 1.0)


def test_messages_of_a_timeline():
    plan = chain_plan(2, 1.0, 1)
    timeline = simulate(full_program(plan), op_seconds(plan), 0.25)
    assert message_seconds(timeline) == []  # a simulated send has no span
    spans = list(timeline.spans)
    for s in timeline.spans:
        if s.op == Op.RECV:  # sent a quarter of a second before it came
            spans.append(s._replace(op="send", stage=s.peer, peer=s.stage,
                                    start=s.end - 0.25, end=s.end - 0.2))
    with_sends = type(timeline)(tuple(spans), 2)
    assert message_seconds(with_sends) == pytest.approx([0.25, 0.25])
    assert ready_receives(with_sends) == []  # the receiver waited


@pytest.mark.timeout(180)
def test_on_real_ranks(ray_cluster):
    """Run plans of different lengths on one group; the executed programs are the lowered ones."""
    row = BY_NAME["VLM-S"]
    pipeline = SleepingPipeline(3)
    try:
        for plan in (chain_plan(3, 1e-4, 3, recompute=True), chain_plan(2, 1e-4, 2, False)):
            program = full_program(plan)
            (timeline,) = pipeline.run(plan, program, 1)
            assert timeline.num_ranks == plan.num_ranks
            for rank, instructions in enumerate(program):
                ran = [s for s in timeline.spans if s.rank == rank]
                ran.sort(key=lambda s: s.start)
                got = [(s.op, s.stage, s.microbatch, s.peer) for s in ran]
                assert got == [(i.op, i.stage, i.microbatch, i.peer) for i in instructions]
        with pytest.raises(ValueError, match="7 stages"):
            pipeline.run(plan := table_plan(row, 1e-6, True, "1f1b"), full_program(plan), 1)
    finally:
        pipeline.close()
