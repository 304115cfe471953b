"""1F1B on a DAG compared with the textbook pattern, a closed form, and each microbatch's work."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raymm.scheduler.graph.module_graph import Direction, ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import COMPUTE, OPTIMIZER_OPS, Instruction, Op, Program
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from tests.support.random_plans import alignment, chain, costs_of, plans, steps, uniform

F, N, B = Op.FORWARD, Op.FORWARD_NO_GRAD, Op.BACKWARD


def compute(rank: tuple[Instruction, ...]) -> list[tuple[Op, int]]:
    return [(i.op, i.microbatch) for i in rank if i.op in COMPUTE]


def textbook(rank: int, ranks: int, microbatches: int) -> list[tuple[Op, int]]:
    """Return PipeDream-flush: warm up, one forward and one backward, cool down."""
    warm_up = min(ranks - rank - 1, microbatches)
    tasks = [(F, m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        tasks += [(F, warm_up + m), (B, m)]
    return tasks + [(B, m) for m in range(microbatches - warm_up, microbatches)]


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_a_chain_is_textbook_1f1b(ranks: int, backward: int) -> None:
    for microbatches in range(1, 11):
        plan = chain(ranks, microbatches)
        costs = uniform(plan, 1, backward)
        program = lower(plan, [()] * microbatches, costs)
        assert [compute(rank) for rank in program] == [
            textbook(rank, ranks, microbatches) for rank in range(ranks)
        ]
        assert check_program(program).live_activations == {
            StageId("llm", rank): min(ranks - rank, microbatches) for rank in range(ranks)
        }


def test_without_costs_a_chain_is_textbook_1f1b_too() -> None:
    program = lower(chain(4, 9), [()] * 9)
    assert [compute(rank) for rank in program] == [textbook(rank, 4, 9) for rank in range(4)]


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 7), (5, 2)])
def test_makespan_of_a_chain(forward: int, backward: int) -> None:
    for ranks in range(1, 7):
        for microbatches in range(1, 11):
            plan = chain(ranks, microbatches)
            costs = uniform(plan, forward, backward)
            timeline = simulate(lower(plan, [()] * microbatches), costs)
            assert timeline.makespan == (microbatches + ranks - 1) * (forward + backward)


def test_messages_spelled_out() -> None:
    program = lower(chain(2, 2), [(), ()])
    assert str(program) == "\n".join([
        "rank 0:",
        "  forward llm.0 #0", "  send llm.0 -> llm.1 #0",
        "  forward llm.0 #1", "  send llm.0 -> llm.1 #1",
        "  recv llm.0 <- llm.1 #0", "  backward llm.0 #0",
        "  recv llm.0 <- llm.1 #1", "  backward llm.0 #1",
        "rank 1:",
        "  recv llm.1 <- llm.0 #0", "  forward llm.1 #0",
        "  backward llm.1 #0", "  send llm.1 -> llm.0 #0",
        "  recv llm.1 <- llm.0 #1", "  forward llm.1 #1",
        "  backward llm.1 #1", "  send llm.1 -> llm.0 #1",
    ])


@pytest.mark.parametrize("frozen", [1, 2, 4])
def test_leading_frozen_stages_have_no_backward(frozen: int) -> None:
    program = lower(chain(4, 6, frozen), [()] * 6)
    for rank, instructions in enumerate(program):
        if rank < frozen:
            assert compute(instructions) == [(N, m) for m in range(6)]
            assert not [
                i for i in instructions if i.op is Op.RECV and i.peer == StageId("llm", rank + 1)
            ]
        else:
            assert compute(instructions) == textbook(rank - frozen, 4 - frozen, 6)
    sent_back = {i.edge for rank in program for i in rank if i.op is Op.SEND
                 and i.edge[0] > i.edge[1]}
    assert sent_back == {(StageId("llm", r + 1), StageId("llm", r)) for r in range(frozen, 3)}


def test_alignment_step_with_missing_modalities() -> None:
    """Use image and speech, image alone, text alone, speech alone."""
    present = [{"vision", "audio"}, {"vision"}, set(), {"audio"}]
    program = lower(alignment(4), present)
    assert check_program(program).live_activations[StageId("vision", 0)] == 0
    ops = Counter((i.op, i.stage) for rank in program for i in rank if i.op in COMPUTE)
    assert ops == {
        (N, StageId("vision", 0)): 2, (F, StageId("vision", 1)): 2, (B, StageId("vision", 1)): 2,
        (F, StageId("audio", 0)): 2, (B, StageId("audio", 0)): 2,
        # Text alone: nothing trainable before the language model, so no backward there.
        **{(op, StageId("llm", i)): n for i in range(3) for op, n in ((F, 3), (N, 1), (B, 3))},
    }
    text = [i for rank in program for i in rank if i.microbatch == 2]
    assert {i.stage for i in text} == {StageId("llm", 0), StageId("llm", 1), StageId("llm", 2)}
    assert {i.op for i in text} == {N, Op.SEND, Op.RECV}


def reachable(plan: Plan, start: str) -> set[str]:
    found = {start}
    for _ in plan.stages:
        found |= {dst for src, dst in plan.stage_edges if src in found}
    return found


def expected_work(plan: Plan, present: list[set[str]], forward_only: bool = False) -> tuple[
    Counter[Instruction], Counter[Instruction]
]:
    """Return (compute, receives) of a step, microbatch by microbatch from their definitions."""
    after = {stage.id: reachable(plan, stage.id) for stage in plan.stages}
    work: Counter[Instruction] = Counter()
    receives: Counter[Instruction] = Counter()
    for m, modules in enumerate(present):
        first = [s for s in plan.stages if s.module in {*modules, *plan.graph.losses}]
        runs = {name for s in first if s.index == 0 for name in after[s.id]}
        needs = {
            name for s in plan.stages if s.id in runs and plan.trainable(s)
            for name in after[s.id]
        } if not forward_only else set()
        for name in runs:
            work[Instruction(F if name in needs else N, name, m)] += 1
            if name in needs:
                work[Instruction(B, name, m)] += 1
        arrived: set[tuple[StageId, int]] = set()
        for src, dst in plan.stage_edges:
            there = src, plan.by_id[dst].rank
            if plan.by_id[src].rank == there[1] or src not in runs or there in arrived:
                continue  # shared inputs of several stages of a rank arrive once
            arrived.add(there)
            receives[Instruction(Op.RECV, dst, m, src)] += 1
            if src in needs:
                back = Instruction(Op.RECV, src, m, dst, direction=Direction.BACKWARD)
                receives[back] += 1
    return work, receives


def check_step(plan: Plan, present: list[set[str]], program: Program, **kwargs) -> None:
    report = check_program(program)
    assert all(live <= plan.depth[stage] for stage, live in report.live_activations.items())
    assert len(program.ranks) == plan.num_ranks
    every = [i for rank in program for i in rank]
    work, receives = expected_work(plan, present, **kwargs)
    assert Counter(i for i in every if i.op in COMPUTE) == work
    assert Counter(i for i in every if i.op is Op.RECV) == receives
    for rank, instructions in enumerate(program):
        assert all(plan.by_id[i.stage].rank == rank for i in instructions)
    for op in (Op.SEND, Op.RECV):
        for edge in {i.edge for i in every if i.op is op}:
            order = [i.microbatch for i in every if i.op is op and i.edge == edge]
            assert order == sorted(order)
    check_neighbours(plan, program)


def check_neighbours(plan: Plan, program: Program) -> None:
    """Check that a task's receives are directly before and its sends directly after it.

    Stages of one rank, which need no message, still follow their data.
    """
    for instructions in program:
        at = {(i.op is B, i.stage, i.microbatch): n for n, i in enumerate(instructions)
              if i.op in COMPUTE}
        for src, dst in plan.stage_edges:
            for backward, stage, m in list(at):
                if stage != src or (backward, dst, m) not in at:
                    continue
                gap = at[backward, dst, m] - at[backward, src, m]
                assert (gap < 0) if backward else (gap > 0)
        last: Instruction | None = None
        for i in instructions:
            if last is not None and last.op is Op.RECV:
                assert i.op is not Op.SEND
                assert (i.stage, i.microbatch) == (last.stage, last.microbatch)
            if i.op is Op.SEND:
                assert last is not None and last.op is not Op.RECV
                assert (i.stage, i.microbatch) == (last.stage, last.microbatch)
            last = i


@given(steps())
def test_any_step_does_exactly_what_it_needs(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    check_step(plan, present, lower(plan, present))


@given(st.data())
def test_any_costs_give_a_program_that_runs(data: st.DataObject) -> None:
    plan, present = data.draw(steps())
    costs = data.draw(costs_of(plan))
    program = lower(plan, present, costs)
    check_step(plan, present, program)
    assert lower(plan, present, costs) == program
    # A stage measured with one kind of forward only is planned with that measurement.
    used = {(i.stage, i.op) for rank in program for i in rank if i.op in COMPUTE}
    assert lower(plan, present, {key: costs[key] for key in used}) == program


@given(steps())
def test_forward_only(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    program = lower(plan, present, forward_only=True)
    check_step(plan, present, program, forward_only=True)
    assert {i.op for rank in program for i in rank} <= {N, Op.SEND, Op.RECV}


@given(steps())
def test_an_absent_encoder_has_no_instruction(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    program = lower(plan, present)
    sources = {n.name for n in plan.graph.nodes if not plan.graph.producers(n.name)}
    for rank in program:
        for i in rank:
            for stage in {i.stage, i.peer} - {NO_STAGE}:
                module = plan.by_id[stage].module
                if module in sources - plan.graph.losses:
                    assert module in present[i.microbatch]


@given(st.data())
def test_no_lower_bound_is_undercut(data: st.DataObject) -> None:
    plan, present = data.draw(steps())
    costs = data.draw(costs_of(plan))
    program = lower(plan, present, costs)
    timeline = simulate(program, costs)
    for rank, instructions in enumerate(program):
        work = sum(costs[i.stage, i.op] for i in instructions if i.op in COMPUTE)
        assert timeline.busy(rank) == work <= timeline.makespan
        assert 0 <= timeline.bubble(rank) <= 1
        spans = sorted((s.start, s.end) for s in timeline.compute() if s.rank == rank)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    for m in range(len(present)):
        mine = {(i.op, i.stage) for rank in program for i in rank if i.microbatch == m}
        assert timeline.makespan >= round_trip(plan, costs, mine)


def round_trip(plan: Plan, costs, mine: set[tuple[Op, str]]) -> int:
    """Return the longest path of one microbatch to the loss and back, by trying every path."""

    def towards_loss(stage: str) -> int:
        time = 0
        for op in (F, N, B):
            if (op, stage) in mine:
                time += costs[stage, op]
        after = [dst for src, dst in plan.stage_edges if src == stage]
        return time + max((towards_loss(dst) for dst in after), default=0)

    return max(towards_loss(stage) for _, stage in mine if stage)


def test_on_a_shared_rank_the_oldest_microbatch_comes_first() -> None:
    """Check that audio of later microbatches does not delay vision of the first."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True, True)), ModuleNode("audio", (True,)),
         ModuleNode("llm", (True,))),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = (Stage("vision", 0, (0, 1), 0), Stage("vision", 1, (1, 2), 1),
              Stage("audio", 0, (0, 1), 0), Stage("llm", 0, (0, 1), 2))
    program = lower(Plan(graph, stages, 2), [("vision", "audio")] * 2)
    assert [str(i) for i in program.ranks[0] if i.op is F] == [
        "forward audio.0 #0", "forward vision.0 #0", "forward audio.0 #1", "forward vision.0 #1",
    ]


def test_modules_with_inputs_run_without_own_data() -> None:
    graph = ModuleGraph(
        tuple(ModuleNode(n, (True,)) for n in ("vision", "audio", "join", "llm")),
        (("vision", "join"), ("audio", "join"), ("join", "llm")),
    )
    plan = Plan(graph, tuple(Stage(n.name, 0, (0, 1), r) for r, n in enumerate(graph.nodes)), 2)
    program = lower(plan, [{"vision"}, set()])
    check_step(plan, [{"vision"}, set()], program)
    assert compute(program.ranks[2]) == [(F, 0), (B, 0)] and not program.ranks[1]


def test_unknown_modality() -> None:
    with pytest.raises(ValueError, match=r"has input for \['video'\]; modules are \['audio', "):
        lower(alignment(1), [{"video"}])


def test_fewer_microbatches_than_the_plan() -> None:
    program = lower(chain(2, 8), [()] * 3)
    assert [compute(rank) for rank in program] == [textbook(rank, 2, 3) for rank in range(2)]


@given(plans())
def test_optimizer_ops_end_every_rank(plan: Plan) -> None:
    program = lower(plan, [()] * plan.num_microbatches)
    closed = program.with_optimizer_ops(OPTIMIZER_OPS)
    check_program(closed)
    for before, after in zip(program, closed, strict=True):
        assert after == before + tuple(Instruction(op) for op in OPTIMIZER_OPS)


@given(st.data())
def test_a_longer_latency_never_helps(data: st.DataObject) -> None:
    plan, present = data.draw(steps())
    assume(plan.num_ranks > 1)
    costs = data.draw(costs_of(plan))
    program = lower(plan, present, costs)
    makespans = [simulate(program, costs, latency).makespan for latency in (0, 1, 5)]
    assert makespans == sorted(makespans)
