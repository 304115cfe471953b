"""The replay of a schedule equals the simulator with ties, tasks of no time, and one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.planned_step import to_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages
from raymm.scheduler.schedules.policy import Rules
from tests.support.random_plans import chain, uniform
from tests.support.tied_steps import in_python, tied_steps

pytestmark = pytest.mark.usefixtures(in_python.__name__)
NETWORKS = [Network(Link(0.0, 1.0)), Network(Link(1.0, 1.0))]


@given(tied_steps(), st.booleans(), st.sampled_from(NETWORKS))
def test_replay_of_tied_tasks_equals_the_simulator(step, flush: bool, network: Network) -> None:
    plan, present = step
    active, costs = active_stages(plan, present), op_seconds(plan)
    scheduler = ListScheduler(plan, active, costs, stage_costs(plan))
    schedule = scheduler.run(Rules(flush=flush))
    program = to_program(plan, active, schedule.tasks, schedule.early)
    transfers = network.transfers(plan)
    timeline = simulate(program, costs, transfers=transfers, posted=plan.posted_receives)
    assert scheduler.replayed(schedule, transfers, costs) == timeline.makespan
    assert scheduler.activation_peaks(schedule) == activation_peaks(program, stage_costs(plan))


@pytest.mark.parametrize(("forward", "backward"), [(0, 0), (0, 3), (2, 5)])
def test_replay_of_one_rank_is_the_sum_of_its_tasks(forward: int, backward: int) -> None:
    plan = chain(1, 5)
    costs = uniform(plan, forward, backward)
    scheduler = ListScheduler(plan, active_stages(plan, [()] * 5), costs)
    seconds = scheduler.replayed(scheduler.run(Rules()), {}, costs)
    assert seconds == 5 * (forward + backward)
