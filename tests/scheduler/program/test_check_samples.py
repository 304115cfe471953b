"""Programs that lose or repeat a sample are rejected."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.program.program import FORWARDS, Instruction, Op, Program
from raymm.scheduler.program.stage_samples import Samples
from tests.scheduler.multiplex.test_mapped_plan import program_of
from tests.support.random_mappings import cases, clip, mapping_of


@given(st.data())
def test_damaged_programs_are_found(data):
    graph, mapping, batch = data.draw(cases())
    plan = mapped_plan(graph, mapping)
    assume(plan.splits_samples)
    program = program_of(plan, [batch])
    lists = [list(rank) for rank in program]
    rank = data.draw(st.sampled_from([rank for rank in lists if rank]))
    at = data.draw(st.integers(0, len(rank) - 1))
    how = data.draw(st.sampled_from(["gone", "cut"]))
    if how == "gone":
        gone = rank.pop(at)
        # A missing last backward without a receiver is detected by counting gradients, not here.
        assume(gone.op in FORWARDS or gone.op in (Op.SEND, Op.RECV))
        left = {i.stage.module for instructions in lists for i in instructions}
        assume(gone.stage.module in left)  # a microbatch may lack a module altogether
    else:
        lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, batch)] * 2)))
        cut = rank[at]._replace(samples=(Range(lo, hi),))
        assume(lo < hi and cut.samples != rank[at].samples)
        rank[at] = cut
    broken = Program(tuple(map(tuple, lists)))
    with pytest.raises(InternalError):
        check_program(broken)
        check_samples(plan, broken, [Samples(batch)])


def test_mismatched_samples_of_a_message_are_detected():
    plan = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
    program = program_of(plan, [4])

    def other(i: Instruction) -> Instruction:
        is_it = i.op is Op.SEND and i.stage.module == "text" and i.direction is Direction.FORWARD
        return i._replace(samples=(Range(0, 1),)) if is_it else i

    broken = Program(tuple(tuple(map(other, rank)) for rank in program))
    with pytest.raises(InternalError, match="sent .* received"):
        check_samples(plan, broken, [Samples(4)])
