"""Programs of processes: every rank's instructions for each of its processes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import alignment, steps

from raymm.scheduler.lower import full_program, lower
from raymm.scheduler.plan import Plan, PlanError
from raymm.scheduler.program import Op, check_program
from raymm.scheduler.shards import Processes


@st.composite
def shared_token_steps(draw: st.DrawFn):
    """A step of a plan in which the module of the loss has several processes per rank."""
    plan, present = draw(steps())
    degree = draw(st.integers(1, 3))
    sink = plan.graph.sink
    with_sink = {s.rank for s in plan.stages if s.module == sink}
    stages = tuple(
        replace(s, cp=degree) if s.module == sink else
        replace(s, rank=s.rank + plan.num_ranks) if s.rank in with_sink else s
        for s in plan.stages
    )
    numbers = {rank: n for n, rank in enumerate(sorted({s.rank for s in stages}))}
    stages = tuple(replace(s, rank=numbers[s.rank]) for s in stages)
    return replace(plan, stages=stages, shared_ranks=None), present


@given(shared_token_steps())
def test_processes_run_what_their_rank_does_and_end(step) -> None:
    plan, present = step
    program, processes = lower(plan, present), Processes(plan)
    expanded = processes.expand(program)
    check_program(expanded)
    assert len(expanded.ranks) == plan.num_processes == len(processes.all)
    messages = (Op.SEND, Op.RECV)
    for instructions, process in zip(expanded.ranks, processes.all, strict=True):
        of_rank = program.ranks[process.rank]
        compute = [(i.op, i.stage.partition("#")[0], i.microbatch) for i in instructions
                   if i.op not in messages]  # fmt: skip
        assert compute == [(i.op, i.stage, i.microbatch) for i in of_rank if i.op not in messages]
        assert {i.stage for i in instructions} <= processes.stages(process).keys()
    edges = set(processes.edges)
    for instructions in expanded.ranks:
        for i in instructions:
            if i.op in messages:
                assert i.edge in edges or i.edge[::-1] in edges


def test_spelled_out() -> None:
    """An encoder sends to both processes of the language model and gets both gradients."""
    plan = alignment(microbatches=1)
    plan = replace(
        plan, stages=tuple(replace(s, cp=2) if s.module == "llm" else s for s in plan.stages)
    )
    processes = Processes(plan)
    program = processes.expand(full_program(plan))
    last = next(s.name for s in plan.module_stages("vision")[::-1])
    sends = [str(i) for rank in program.ranks for i in rank if i.op is Op.SEND and i.stage == last]
    receives = [str(i) for r in program.ranks for i in r if i.op is Op.RECV and i.stage == last]
    assert [f"send {last} -> llm.0{k} #0" for k in ("", "#1")] == [
        one for one in sends if "llm" in one
    ]
    assert len([one for one in receives if "llm" in one]) == 2
    again = Plan.from_json(plan.to_json())
    assert again == plan


def test_degrees_that_do_not_fit_are_refused() -> None:
    plan = alignment(microbatches=1)
    some = tuple(replace(s, cp=2) if s.name == "llm.0" else s for s in plan.stages)
    with pytest.raises(PlanError, match="all stages of llm must have the same"):
        replace(plan, stages=some)
    with pytest.raises(PlanError, match="cp of stage"):
        replace(plan, stages=tuple(replace(s, cp=0) for s in plan.stages))
