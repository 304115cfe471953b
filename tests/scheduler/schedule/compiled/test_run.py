"""The list scheduler equals the readable one with ties, tasks of no time, and one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages
from raymm.scheduler.schedules.policy import Rules
from tests.support.random_plans import chain, uniform
from tests.support.reference_list_schedule import ListScheduler as Reference
from tests.support.tied_steps import in_python, tied_steps

pytestmark = pytest.mark.usefixtures(in_python.__name__)


@given(tied_steps(), st.booleans(), st.booleans())
def test_order_of_tied_tasks_equals_the_readable_one(step, flush: bool, split: bool) -> None:
    plan, present = step
    arguments = plan, active_stages(plan, present), op_seconds(plan), stage_costs(plan)
    rules = Rules(flush=flush, split=split)
    schedule, expected = ListScheduler(*arguments).run(rules), Reference(*arguments).run(rules)
    assert schedule.tasks == expected.tasks
    assert schedule.makespan == expected.makespan


@pytest.mark.parametrize("seconds", [0, 1])
def test_one_rank_alternates_forwards_and_backwards(seconds: int) -> None:
    plan = chain(1, 4)
    active = active_stages(plan, [()] * 4)
    schedule = ListScheduler(plan, active, uniform(plan, seconds, seconds)).run(Rules())
    order = [(str(task.op), task.microbatch) for task in schedule.tasks[0]]
    assert order == [(op, m) for m in range(4) for op in ("forward", "backward")]
    assert schedule.makespan == pytest.approx(8 * seconds, abs=1e-6)
