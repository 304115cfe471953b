"""Defaults of schedules, and the order of listed ones."""

from __future__ import annotations

import pytest

from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from raymm.scheduler.schedules.base import ListedSchedule, Schedule, Task
from raymm.scheduler.schedules.policy import Rules
from tests.support.random_plans import alignment, chain


class Reversed(Schedule):
    """Microbatches from the last to the first."""

    def order(self, step, rank):
        return [
            task for tasks in (step.forwards, step.backwards) for stage in step.stages(rank)
            for m in reversed(range(step.num_microbatches)) for task in tasks(stage, m)
        ]


class Listed(ListedSchedule):
    def listed(self, step):
        return step.run(Rules(flush=True))


def step_of(plan):
    return PlannedStep(plan, active_stages(plan, full_step(plan)))


def test_a_schedule_needs_only_an_order():
    step, schedule = step_of(chain(1, 2)), Reversed()
    assert schedule.listed(step) is None and schedule.tuned(step) == (None, step.seconds())
    assert schedule.order(step, 0) == [
        Task(StageId("llm", 0), m, op) for op in (Op.FORWARD, Op.BACKWARD) for m in (1, 0)
    ]
    with pytest.raises(TypeError, match="abstract"):
        Schedule()


def test_a_listed_schedule_orders_each_rank_by_its_list(monkeypatch):
    step = step_of(alignment(3))
    monkeypatch.setitem(step.__dict__, "listed", Listed().listed(step))
    tasks = [Listed().order(step, rank) for rank in range(step.plan.num_ranks)]
    assert all(task.group == -1 and task.quota == 1.0 for rank in tasks for task in rank)
    for rank, order in enumerate(tasks):
        stages = {stage.id for stage in step.plan.rank_stages(rank)}
        assert {task.stage for task in order} == stages
        backward = [task.op is Op.BACKWARD for task in order]
        assert backward == sorted(backward)  # GPipe
