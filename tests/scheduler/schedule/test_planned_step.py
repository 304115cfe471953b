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
from tests.support.field_schedules import stepped
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
