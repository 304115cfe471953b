"""Schedules that are an order of preference stay within the plan's memory.

The oracles of tests/scheduler/program/test_issue_order.py (no deadlock under NCCL) and
tests/scheduler/schedule/test_lower.py (every task once) cover them as they cover 1F1B.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.schedules.ordered import OrderedSchedule, encoder_stages
from raymm.scheduler.schedules.registry import SCHEDULES, find_schedule
from tests.support.field_schedules import FIELD
from tests.support.random_plans import alignment, contents, plans, profiled_plans


def test_field_schedules_are_registered() -> None:
    ordered = [name for name in SCHEDULES if isinstance(find_schedule(name), OrderedSchedule)]
    assert sorted(ordered) == sorted(FIELD)


@given(plans())
def test_encoders_are_all_modules_before_the_backbone(plan) -> None:
    def feeds_backbone(module: str) -> bool:
        return any(
            consumer == plan.graph.backbone or feeds_backbone(consumer)
            for producer, consumer in plan.graph.edges if producer == module
        )

    expected = {stage for stage in plan.stages if feeds_backbone(stage.module)}
    assert set(encoder_stages(plan)) == expected
    assert {stage.module for stage in encoder_stages(alignment(1))} == {"vision", "audio"}


@given(st.data(), st.sampled_from(FIELD))
def test_memory_stays_within_the_limits(data, schedule: str) -> None:
    """Give each rank the memory of 1F1B, or half of it."""
    plan = data.draw(profiled_plans())
    present = data.draw(contents(plan))
    sizes = stage_costs(plan)
    peaks = activation_peaks(lower(replace(plan, schedule="1f1b"), present), sizes)
    share = data.draw(st.sampled_from([1.0, 0.5]))
    limits = tuple(int(peak * share) for peak in peaks)
    limited = replace(plan, schedule=schedule, activation_limits=limits)
    try:
        program = lower(limited, present)
    except NoPlanError:
        return
    check_program(program)
    for rank, peak in enumerate(activation_peaks(program, sizes)):
        temporary = max(sizes[stage.id].remade_bytes for stage in plan.rank_stages(rank))
        assert peak - temporary <= limits[rank]
