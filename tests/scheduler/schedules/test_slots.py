"""Slots: forward through a rank's slots in order, and backward in reverse."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.program.program import BACKWARDS, FORWARDS
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.step_graph import active_stages, full_samples, full_step
from raymm.scheduler.schedules.slots import Slots
from tests.support.random_mappings import cases


@given(cases(), st.integers(1, 3), st.booleans())
def test_slots_run_in_order_and_back(case, microbatches, forward_only):
    graph, mapping, _ = case
    plan = mapped_plan(graph, mapping, microbatches)
    active = active_stages(plan, full_step(plan), forward_only, samples=full_samples(plan))
    step = PlannedStep(plan, active, forward_only=forward_only)
    for rank in range(plan.num_ranks):
        tasks = Slots().order(step, rank)
        expected = [
            task for stage in plan.rank_stages(rank) for m in range(microbatches)
            for task in (*step.forwards(stage, m), *step.backwards(stage, m))
        ]
        assert sorted(t[:3] for t in tasks) == sorted(t[:3] for t in expected)
        assert [t.microbatch for t in tasks] == sorted(t.microbatch for t in tasks)
        for m in range(microbatches):
            own = [t for t in tasks if t.microbatch == m]
            slots = [
                [plan.by_id[t.stage].slot for t in own if t.op in ops]
                for ops in (FORWARDS, BACKWARDS)
            ]
            assert slots[0] == sorted(slots[0]) and slots[1] == sorted(slots[1], reverse=True)
            assert [t.op in BACKWARDS for t in own] == sorted(t.op in BACKWARDS for t in own)
        groups: dict[int, set] = {}
        for task in tasks:
            stage = plan.by_id[task.stage]
            assert task.quota == (stage.quota or 1.0) and (task.group >= 0) == bool(stage.quota)
            if task.group >= 0:
                place = task.microbatch, task.op in BACKWARDS, stage.slot
                groups.setdefault(task.group, set()).add(place)
        assert all(len(places) == 1 for places in groups.values())
