"""Slots of multiplexed mappings (Mosaic §3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymm.scheduler.schedules.base import Schedule, Step, Task


class Slots(Schedule):
    """Stages in sequence over a pool of GPUs, with modules side by side in each slot.

    Every rank runs microbatch by microbatch: forward through its slots, then backward in reverse.
    Stages of a slot with quotas form a concurrent group.
    """

    name = "slots"
    uses_slots = True
    proven = True

    def order(self, step: Step, rank: int) -> Sequence[Task]:
        slots: dict[int, list[Any]] = {}
        for stage in step.stages(rank):
            slots.setdefault(stage.slot or 0, []).append(stage)
        order = sorted(slots)
        tasks: list[Task] = []
        group = 0
        for microbatch in range(step.num_microbatches):
            for tasks_of, passed in ((step.forwards, order), (step.backwards, order[::-1])):
                for slot in passed:
                    for stage in slots[slot]:
                        stage_tasks = tasks_of(stage, microbatch)
                        if stage.quota is not None:
                            stage_tasks = tuple(
                                task._replace(group=group, quota=stage.quota)
                                for task in stage_tasks
                            )
                        tasks += stage_tasks
                    group += 1
        return tasks
