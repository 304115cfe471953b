"""Tasks of a plan in slots: forward through the slots, then backward in reverse (Mosaic §3)."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.schedule_rules import Task
from raymm.scheduler.schedule.step_graph import ActiveStages


def slot_tasks(plan: Plan, active: Sequence[ActiveStages]) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each rank, in order, microbatch by microbatch. ``active`` has the stages
    that each microbatch uses."""
    return tuple(_rank_tasks(plan, rank, active) for rank in range(plan.num_ranks))


def _rank_tasks(plan: Plan, rank: int, active: Sequence[ActiveStages]) -> tuple[Task, ...]:
    slots: dict[int, list[Stage]] = {}
    for stage in plan.rank_stages(rank):
        slots.setdefault(stage.slot or 0, []).append(stage)
    order = sorted(slots)
    tasks: list[Task] = []
    group = 0
    for microbatch, uses in enumerate(active):
        for ops_of, passed in ((_forwards, order), (_backwards, order[::-1])):
            for slot in passed:
                for stage in slots[slot]:
                    group_quota = (-1, 1.0) if stage.quota is None else (group, stage.quota)
                    tasks += [
                        Task(stage.id, microbatch, op, *group_quota) for op in ops_of(stage, uses)
                    ]
                group += 1
    return tuple(tasks)


def _forwards(stage: Stage, uses: ActiveStages) -> tuple[Op, ...]:
    if stage.id not in uses.stages:
        return ()
    if stage.id not in uses.needs_backward:
        return (Op.FORWARD_NO_GRAD,)
    return (Op.FORWARD_CHECKPOINTED if stage.recompute else Op.FORWARD,)


def _backwards(stage: Stage, uses: ActiveStages) -> tuple[Op, ...]:
    if stage.id not in uses.needs_backward:
        return ()
    return (Op.RECOMPUTE, Op.BACKWARD) if stage.recompute else (Op.BACKWARD,)
