"""GPipe: all forwards of a stage, then all of its backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.program.program import BACKWARDS, FORWARDS
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from tests.support.random_plans import chain, contents, plans, uniform


@given(st.data())
def test_gpipe_runs_all_forwards_of_a_stage_first(data) -> None:
    plan = replace(data.draw(plans()), schedule="gpipe")
    for rank in lower(plan, data.draw(contents(plan))):
        for stage in {i.stage for i in rank}:
            forwards = [n for n, i in enumerate(rank) if i.stage == stage and i.op in FORWARDS]
            backwards = [n for n, i in enumerate(rank) if i.stage == stage and i.op in BACKWARDS]
            assert max(forwards, default=-1) < min(backwards, default=len(rank))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (3, 1), (4, 6)])
def test_gpipe_time_of_a_chain(ranks: int, microbatches: int) -> None:
    """Forwards and backwards each take microbatches + ranks - 1 times their seconds."""
    plan = replace(chain(ranks, microbatches), schedule="gpipe")
    program = lower(plan, [()] * microbatches)
    seconds = simulate(program, uniform(plan, 3, 5)).makespan
    assert seconds == (microbatches + ranks - 1) * (3 + 5)
