"""Results of list schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raymm.scheduler.schedule.step_parts import OPS, Part
from raymm.scheduler.schedules.base import Task


class PartSchedule(NamedTuple):
    """Tasks of a part of a step.

    Attributes:
        log: (tasks, 4) int64, stage, microbatch, operation and group of every task, rank by rank,
            in order.
        starts: (ranks + 1,) offset of each rank's tasks.
        makespan: seconds until the last task ends.
    """

    log: np.ndarray
    starts: np.ndarray
    makespan: float

    @classmethod
    def of(cls, stage_ranks: np.ndarray, log: np.ndarray, makespan: float) -> PartSchedule:
        """Return the schedule of tasks in the order in which they begin. ``stage_ranks`` is
        (stages,)."""
        small = stage_ranks.astype(np.min_scalar_type(stage_ranks.max()))  # sorts in linear time
        ranks = small[log[:, 0]]
        order = np.argsort(ranks, kind="stable")
        starts = np.searchsorted(ranks[order], np.arange(stage_ranks.max() + 2))
        return cls(log[order], starts, makespan)


@dataclass(frozen=True)
class StepSchedule:
    """Tasks of a step, by part, and the seconds until the last task ends. ``early`` is True if a
    recomputation does not wait for its gradient."""

    parts: tuple[Part, ...]
    results: tuple[PartSchedule, ...]
    makespan: float
    early: bool = True

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        ranks: dict[int, tuple[Task, ...]] = {}
        for part, result in zip(self.parts, self.results, strict=True):
            ids, quotas = [s.id for s in part.stages], [s.quota or 1.0 for s in part.stages]
            tasks = [
                Task(ids[s], part.microbatches[m], OPS[op], group, quotas[s] if group >= 0 else 1.0)
                for s, m, op, group in result.log.tolist()
            ]
            for index, rank in enumerate(part.ranks):
                ranks[rank] = tuple(tasks[result.starts[index] : result.starts[index + 1]])
        return tuple(ranks[rank] for rank in range(len(ranks)))
