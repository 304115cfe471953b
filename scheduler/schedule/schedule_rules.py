"""What a list schedule is asked for, and what comes of it."""

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
    """One compute instruction to be."""

    stage: StageId
    microbatch: int
    op: Op
    group: int = -1
    quota: float = 1.0


@dataclass(frozen=True)
class Rules:
    """What kind of schedule to make.

    Attributes:
        policy: how a rank chooses.
        flush: whether a stage holds all its microbatches before its first backward (GPipe);
            if not, it runs no further ahead than its depth (1F1B's warm-up).
        split: whether B_w is a task of its own where somebody waits for B_d; it then becomes
            as urgent as what waits for its memory.
        early_recompute: whether a recomputation may start before the gradient is there.
        byte_limits: per rank, bytes of activations.
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
        starts: (ranks + 1,) where those of each rank begin.
        makespan: seconds until the last ends.
    """

    log: np.ndarray
    starts: np.ndarray
    makespan: float

    @classmethod
    def of(cls, stage_ranks: np.ndarray, log: np.ndarray, makespan: float) -> PartSchedule:
        """From tasks in the order in which they begin.

        Args:
            stage_ranks: (stages,) the rank of each.
            log: of tasks in any order of ranks.
            makespan: seconds until the last ends.
        """
        ranks = stage_ranks[log[:, 0]]
        order = np.argsort(ranks, kind="stable")
        starts = np.searchsorted(ranks[order], np.arange(stage_ranks.max() + 2))
        return cls(log[order], starts, makespan)


@dataclass(frozen=True)
class Schedule:
    """Tasks per rank, in order, and when the last one ends (seconds).

    Attributes:
        parts, results: of the step.
        makespan: seconds until the last task ends.
        early: whether a recomputation runs without waiting for its gradient.
    """

    parts: tuple[Part, ...]
    results: tuple[PartSchedule, ...]
    makespan: float
    early: bool = True

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        """By rank."""
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
