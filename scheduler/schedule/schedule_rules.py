"""Rules and results of list schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raymm.scheduler.plan.policy import ONE_F_ONE_B, Policy
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.step_parts import OPS, Part


class Task(NamedTuple):
    """One operation of a stage on a microbatch; ``group`` is -1 outside concurrent groups."""
    stage: StageId
    microbatch: int
    op: Op
    group: int = -1
    quota: float = 1.0


@dataclass(frozen=True)
class Rules:
    """Kind of schedule to create.

    Attributes:
        flush: True if a stage runs all forwards before its first backward (GPipe); otherwise it
            runs ahead by at most its depth (1F1B's warm-up).
        split: True if B_w is a separate task where another stage waits for B_d. It becomes as
            urgent as the tasks that wait for its memory.
        early_recompute: True if a recomputation may start before its gradient arrives.
        byte_limits: bytes of activations per rank.
    """

    policy: Policy = ONE_F_ONE_B
    flush: bool = False
    split: bool = False
    early_recompute: bool = False
    byte_limits: tuple[float, ...] | None = None


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
        ranks = stage_ranks[log[:, 0]]
        order = np.argsort(ranks, kind="stable")
        starts = np.searchsorted(ranks[order], np.arange(stage_ranks.max() + 2))
        return cls(log[order], starts, makespan)


@dataclass(frozen=True)
class Schedule:
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
