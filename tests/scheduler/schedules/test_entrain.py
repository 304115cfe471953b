"""Entrain defers the work of encoders that deviates from a steady pace."""

from __future__ import annotations

from dataclasses import replace

from raymm.scheduler.schedules.entrain import Entrain
from tests.support.field_schedules import replicated_plan, stepped


def test_entrain_defers_excess_work_only_if_there_is_some() -> None:
    plan = replicated_plan(12, "entrain")
    uneven = stepped(plan, loads={"vision": [4.0, 0.5, 0.5, 0.5] * 3})
    vision, llm = plan.module_stages("vision")[0].id, plan.module_stages("llm")[0].id
    for step, deferred in ((stepped(plan), 0), (uneven, 2)):  # two microbatches of mean work
        ahead = Entrain().task_order(step).ahead
        assert ahead[vision] == plan.warm_up[vision] + deferred
        assert ahead[llm] == plan.warm_up[llm]
    slow = stepped(replace(plan, schedule="megatron"), loads=uneven.loads)
    assert uneven.seconds() < slow.seconds()
