"""check_program detects every way to break a program, at every position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import OPTIMIZER_OPS, Instruction, Op, Program
from raymm.scheduler.schedule.lower import lower
from tests.support.random_plans import alignment, chain, steps

F, N, B, S, R = Op.FORWARD, Op.FORWARD_NO_GRAD, Op.BACKWARD, Op.SEND, Op.RECV
FIRST, SECOND, THIRD = map(StageId, "abc")
BOTH = frozenset({"vision", "audio"})
MIXED = [BOTH, BOTH, frozenset(), BOTH]
PROGRAMS = [
    pytest.param(lower(chain(4, 6), [()] * 6), id="chain"),
    pytest.param(lower(alignment(4), MIXED), id="alignment"),
    pytest.param(
        lower(chain(3, 4, frozen=1), [()] * 4).with_optimizer_ops(OPTIMIZER_OPS), id="frozen"
    ),
]


def places(program: Program, *ops: Op) -> list[tuple[int, int]]:
    return [(r, n) for r, rank in enumerate(program) for n, i in enumerate(rank) if i.op in ops]


def edited(program: Program, rank: int, at: int, *instead: Instruction) -> Program:
    """Return the program with one instruction replaced."""
    ranks = list(program.ranks)
    ranks[rank] = (*ranks[rank][:at], *instead, *ranks[rank][at + 1 :])
    return Program(tuple(ranks))


def exchanged(program: Program, rank: int, one: int, two: int) -> Program:
    """Return the program with two instructions of a rank swapped."""
    a, b = program.ranks[rank][one], program.ranks[rank][two]
    return edited(edited(program, rank, one, b), rank, two, a)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_unbroken_program_is_accepted(program: Program) -> None:
    check_program(program)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("op", [S, R])
def test_two_messages_of_an_edge_exchanged(program: Program, op: Op) -> None:
    tried = 0
    for rank, one in places(program, op):
        for other, two in places(program, op):
            same = program.ranks[rank][one].edge == program.ranks[other][two].edge
            if rank == other and one < two and same:
                tried += 1
                with pytest.raises(InternalError):
                    check_program(exchanged(program, rank, one, two))
    assert tried >= 10


def test_the_message_names_both_microbatches() -> None:
    # Both receives before both forwards, so that only their order is wrong.
    rank = (
        Instruction(R, SECOND, 1, FIRST),
        Instruction(R, SECOND, 0, FIRST),
        Instruction(N, SECOND, 0),
        Instruction(N, SECOND, 1),
    )
    sender = tuple(
        i for m in range(2) for i in (Instruction(N, FIRST, m), Instruction(S, FIRST, m, SECOND))
    )
    with pytest.raises(InternalError, match=r"rank 1: recv b <- a #1 would receive microbatch 0"):
        check_program(Program((sender, rank)))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("op", [S, R, B])
def test_any_instruction_dropped(program: Program, op: Op) -> None:
    assert places(program, op)
    for rank, at in places(program, op):
        with pytest.raises(InternalError):
            check_program(edited(program, rank, at))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_needed_forward_dropped(program: Program) -> None:
    for rank, at in places(program, F):
        with pytest.raises(InternalError, match="before its forward"):
            check_program(edited(program, rank, at))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("op", [F, N, B, S, R])
def test_any_instruction_duplicated(program: Program, op: Op) -> None:
    for rank, at in places(program, op):
        instruction = program.ranks[rank][at]
        with pytest.raises(InternalError):
            check_program(edited(program, rank, at, instruction, instruction))


def test_errors_name_the_broken_instruction() -> None:
    program = lower(chain(2, 2), [(), ()])  # spelled out in test_one_f_one_b

    def message(broken: Program) -> str:
        with pytest.raises(InternalError) as caught:
            check_program(broken)
        return str(caught.value)

    forward, backward = program.ranks[0][0], program.ranks[0][5]
    assert message(edited(program, 0, 0, forward, forward)) == (
        "rank 0: forward llm.0 #0 runs twice")
    assert message(edited(program, 0, 5, backward, backward)) == (
        "rank 0: backward llm.0 #0 runs twice")
    assert message(edited(program, 0, 5)) == (
        "stage llm.0: 1 forward(s) have no backward")
    assert message(edited(program, 0, 3)) == (
        "deadlock: rank 0 waits forever in recv llm.0 <- llm.1 #1")
    assert message(edited(program, 0, 6)) == "edge llm.1 -> llm.0: no rank receives [1]"
    assert message(edited(program, 0, 0, Instruction(N, StageId("llm", 0), 0))) == (
        "rank 0: backward llm.0 #0, but its forward kept nothing")
    assert message(exchanged(program, 0, 0, 1)) == (
        "rank 0: send llm.0 -> llm.1 #0 before its forward")
    assert message(exchanged(program, 1, 2, 3)) == (
        "rank 1: send llm.1 -> llm.0 #0 before its backward")
    assert message(exchanged(program, 1, 0, 1)) == (
        "rank 1: recv llm.1 <- llm.0 #0 after its forward")
    assert message(exchanged(program, 0, 4, 5)) == (
        "rank 0: recv llm.0 <- llm.1 #0 after its backward")


@pytest.mark.parametrize("program", PROGRAMS)
def test_messages_and_compute_in_the_wrong_order(program: Program) -> None:
    """Put a receive after the task that uses it, and a send before the task that produces it."""
    for rank, at in places(program, F, N, B):
        instructions = program.ranks[rank]
        key = (instructions[at].stage, instructions[at].microbatch)
        for near in (at - 1, at + 1):
            if not 0 <= near < len(instructions) or instructions[near].op not in (S, R):
                continue
            if (instructions[near].stage, instructions[near].microbatch) == key:
                with pytest.raises(InternalError):
                    check_program(exchanged(program, rank, min(at, near), max(at, near)))


def test_ranks_that_wait_for_each_other() -> None:
    program = Program(
        (
            (
                Instruction(R, FIRST, 0, SECOND),
                Instruction(N, FIRST, 0),
                Instruction(S, FIRST, 0, THIRD),
            ),
            (
                Instruction(R, SECOND, 0, THIRD),
                Instruction(N, SECOND, 0),
                Instruction(S, SECOND, 0, FIRST),
            ),
            (
                Instruction(R, THIRD, 0, FIRST),
                Instruction(N, THIRD, 0),
                Instruction(S, THIRD, 0, SECOND),
            ),
        )
    )
    with pytest.raises(InternalError, match="deadlock: rank 0 waits forever in recv a <- b #0"):
        check_program(program)


def test_a_rank_that_waits_for_itself() -> None:
    program = Program(
        (
            (
                Instruction(N, FIRST, 0),
                Instruction(R, SECOND, 0, FIRST),
                Instruction(S, FIRST, 0, SECOND),
            ),
        )
    )
    with pytest.raises(InternalError, match="deadlock: rank 0 waits forever"):
        check_program(program)


def test_the_backward_of_another_microbatch() -> None:
    program = Program((
        (Instruction(N, FIRST, 0), Instruction(F, FIRST, 1), Instruction(B, FIRST, 0)),
    ))
    with pytest.raises(InternalError, match="rank 0: backward a #0, but its forward kept nothing"):
        check_program(program)


def test_a_stage_on_two_ranks() -> None:
    program = Program(((Instruction(F, FIRST, 0),), (Instruction(B, FIRST, 0),)))
    with pytest.raises(InternalError, match="rank 1: backward a #0, but stage a is on rank 0"):
        check_program(program)


def collective(*ops: Op) -> tuple[Instruction, ...]:
    return tuple(Instruction(op) for op in ops)


@pytest.mark.parametrize(
    "other",
    [
        (Op.CLIP_GRADS, Op.REDUCE_GRADS, Op.STEP),
        (Op.REDUCE_GRADS, Op.STEP),
        (),
        (*OPTIMIZER_OPS, Op.STEP),
    ],
    ids=["order", "one less", "none", "one more"],
)
def test_collectives_that_do_not_match(other: tuple[Op, ...]) -> None:
    program = Program((collective(*OPTIMIZER_OPS), collective(*OPTIMIZER_OPS), collective(*other)))
    with pytest.raises(InternalError, match="rank 2 runs collectives"):
        check_program(program)


def test_a_message_across_a_collective() -> None:
    """Let rank 1 wait for a message that rank 0 sends only after a collective with rank 1."""
    late = Program((
        (Instruction(N, FIRST, 0), *collective(Op.STEP), Instruction(S, FIRST, 0, SECOND)),
        (Instruction(R, SECOND, 0, FIRST), Instruction(N, SECOND, 0), *collective(Op.STEP)),
    ))
    with pytest.raises(InternalError, match="deadlock: rank 0 waits forever in step"):
        check_program(late)
    good = Program((
        (Instruction(N, FIRST, 0), Instruction(S, FIRST, 0, SECOND), *collective(Op.STEP)),
        (*collective(Op.STEP), Instruction(R, SECOND, 0, FIRST), Instruction(N, SECOND, 0)),
    ))
    assert check_program(good).live_activations == {FIRST: 0, SECOND: 0}


def test_empty_programs() -> None:
    assert check_program(Program(())).live_activations == {}
    assert check_program(Program(((), ()))).live_activations == {}


@given(st.data())
def test_any_program_with_one_fault(data: st.DataObject) -> None:
    plan, present = data.draw(steps())
    assert isinstance(plan, Plan)
    program = lower(plan, present)
    check_program(program)
    droppable = places(program, S, R, B)
    if droppable:
        with pytest.raises(InternalError):
            check_program(edited(program, *data.draw(st.sampled_from(droppable))))
    rank, at = data.draw(st.sampled_from(places(program, F, N)))
    twice = program.ranks[rank][at]
    with pytest.raises(InternalError, match="runs twice"):
        check_program(edited(program, rank, at, twice, twice))


def one_way(microbatches: int, back: bool = False) -> Program:
    """Return a frozen stage that runs ahead of the next one.

    With ``back``, a third stage follows on the first one's rank and comes last there.
    """
    a, b, c = StageId("a", 0), StageId("b", 0), StageId("c", 0)
    ahead = Direction.FORWARD
    first, second = [], []
    for m in range(microbatches):
        first += [Instruction(N, a, m), Instruction(S, a, m, b, direction=ahead)]
        second += [Instruction(R, b, m, a, direction=ahead), Instruction(N, b, m)]
        if back:
            second.append(Instruction(S, b, m, c, direction=ahead))
    if back:
        for m in range(microbatches):
            first += [Instruction(R, c, m, b, direction=ahead), Instruction(N, c, m)]
    return Program((tuple(first), tuple(second)))


@pytest.mark.parametrize(
    ("microbatches", "back", "bound"),
    # With both directions full, the first rank has sent twice the accepted messages.
    [(64, False, 4), (1, False, 4), (4, True, 4), (8, True, 4), (64, True, None)],
)
def test_messages_in_flight_are_bounded_if_possible(microbatches, back, bound):
    assert check_program(one_way(microbatches, back)).bound == bound


def test_deadlocks_without_a_bound_are_reported() -> None:
    program = one_way(64, True)
    broken = Program((program.ranks[0], program.ranks[1][3:]))
    with pytest.raises(InternalError):
        check_program(broken)
