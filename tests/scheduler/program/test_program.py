"""Instructions and programs: edges, groups, collectives at the end, and their texts."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import (
    BACKWARDS,
    COMPUTE,
    FORWARDS,
    OPTIMIZER_OPS,
    Instruction,
    Op,
    Program,
    group_end,
)

VISION, LLM = StageId("vision", 0), StageId("llm", 1)


def test_both_ends_of_a_message_name_one_edge():
    assert Instruction(Op.SEND, VISION, 0, LLM).edge == (VISION, LLM)
    assert Instruction(Op.RECV, LLM, 0, VISION).edge == (VISION, LLM)


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=12))
def test_groups_are_runs_of_equal_numbers(groups):
    instructions = [Instruction(Op.FORWARD, group=group) for group in groups]
    ends, index = [], 0
    while index < len(groups):
        index = group_end(instructions, index)
        ends.append(index)
    expected, total = [], 0
    for group, run in groupby(groups):
        for size in [1] * len(list(run)) if group < 0 else [len(list(run))]:
            total += size
            expected.append(total)
    assert ends == expected


def test_collectives_end_every_rank():
    forward = Instruction(Op.FORWARD, LLM, 0)
    program = Program(((forward,), ())).with_optimizer_ops(OPTIMIZER_OPS)
    assert [[i.op for i in rank] for rank in program] == [
        [Op.FORWARD, *OPTIMIZER_OPS], list(OPTIMIZER_OPS)
    ]


def test_texts_name_everything_that_matters():
    send = Instruction(Op.SEND, VISION, 3, LLM, samples=(Range(0, 2), Range(4, 5)))
    assert str(send) == "send vision.0 -> llm.1 #3[0:2, 4:5]"
    grouped = Instruction(Op.BACKWARD, LLM, 0, group=2, quota=0.25)
    assert str(grouped) == "backward llm.1 #0 (group 2, quota 0.25)"
    assert str(Program(((Instruction(Op.STEP),),))) == "rank 0:\n  step"


def test_operations_are_of_one_kind():
    assert not FORWARDS & BACKWARDS and FORWARDS | BACKWARDS < COMPUTE
    assert set(Op) - COMPUTE == {Op.SEND, Op.RECV, *OPTIMIZER_OPS}
