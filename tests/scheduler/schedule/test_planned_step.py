"""Steps of plans: seconds with loads of single microbatches, and bounds of the seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.field_schedules import replicated_plan, stepped
from tests.support.random_plans import contents, profiled_plans


@given(st.data(), st.sampled_from(SCHEDULES))
def test_loads_take_the_seconds_that_the_simulator_finds(data, schedule: str) -> None:
    plan = replace(data.draw(profiled_plans()), schedule=schedule)
    present = data.draw(contents(plan))
    loads = {
        node.name: [data.draw(st.integers(0, 4)) / 2 for _ in present] for node in plan.graph.nodes
    }
    step = stepped(plan, present, loads)
    check_program(step.program)
    costs = {
        (stage, op, number): seconds * loads[stage.module][number]
        for (stage, op), seconds in op_seconds(plan).items() for number in range(len(present))
    }
    timeline = simulate(
        step.program, {}, microbatch_costs=costs, posted=plan.posted_receives
    )
    assert step.seconds() == pytest.approx(timeline.makespan, abs=1e-6)


@given(st.data(), st.sampled_from(("1f1b", "gpipe")), st.sampled_from((0.3, 0.9, 1.0)))
def test_only_a_slower_step_ends_early(data, schedule: str, share: float) -> None:
    plan = replace(data.draw(profiled_plans()), schedule=schedule)
    present = data.draw(contents(plan))
    loads = {
        node.name: [data.draw(st.integers(0, 4)) / 2 for _ in present] for node in plan.graph.nodes
    }
    step = stepped(plan, present, loads)
    until = share * step.seconds()
    taken = step.with_loads(schedule, loads, until).seconds()
    assert taken == step.seconds() or taken == float("inf") and share < 1


def test_a_much_slower_step_of_1f1b_ends_early() -> None:
    step = stepped(replicated_plan(8, "1f1b"))
    assert step.with_loads("1f1b", {}, step.seconds() / 2).seconds() == float("inf")
