"""Zero bubble: fills the drain with B_w, is never slower than 1F1B, and searches for a policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.lower import full_program, iteration_time, lower, refine
from tests.scheduler.schedule.test_lower import any_plans
from tests.scheduler.schedule.test_lower import chain as costed_chain
from tests.support.random_plans import contents, profiled_plans


@given(any_plans())
def test_it_is_never_slower_than_1f1b_and_tuning_never_hurts(plan) -> None:
    plan = replace(plan, schedule="zero_bubble", num_microbatches=min(plan.num_microbatches, 4))
    seconds = iteration_time(plan)
    assert seconds <= iteration_time(replace(plan, schedule="1f1b")) + 1e-5
    tuned, tuned_seconds = refine(plan)
    assert tuned_seconds <= seconds + 1e-5
    assert iteration_time(tuned) == pytest.approx(tuned_seconds, abs=1e-5)


@given(st.data())
def test_evaluation_runs_the_tasks_of_1f1b(data) -> None:
    plan = replace(data.draw(profiled_plans()), schedule="zero_bubble")
    present = data.draw(contents(plan))
    program = lower(plan, present, forward_only=True)
    assert program == lower(replace(plan, schedule="1f1b"), present, forward_only=True)


def test_weight_gradients_fill_the_drain():
    plan = costed_chain(4, 8, "zero_bubble")
    first = full_program(plan).ranks[0]
    assert Op.BACKWARD_WEIGHT in {i.op for i in first}
    assert iteration_time(plan) < iteration_time(replace(plan, schedule="1f1b"))


def test_frozen_models_have_no_weight_gradients():
    """A recomputation ahead of its gradient is the only gain."""
    plan = costed_chain(4, 8, "zero_bubble", trainable=False, recompute=True)
    later = [i.op for rank in full_program(plan).ranks[1:] for i in rank]
    assert Op.BACKWARD_WEIGHT not in later and Op.RECOMPUTE in later
    assert iteration_time(plan) < iteration_time(replace(plan, schedule="1f1b"))


def test_limits_below_one_microbatch_are_rejected():
    plan = replace(costed_chain(2, 4, "zero_bubble"), activation_limits=(10, 10))
    with pytest.raises(NoPlanError, match="needs room for one microbatch"):
        full_program(plan)
