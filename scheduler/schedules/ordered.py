"""Base of schedules that are an order of preference over the tasks of every microbatch."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from raymm.scheduler.schedules.base import ListedSchedule
from raymm.scheduler.schedules.policy import Policy, Rules, TaskOrder

# Added to the keys of backwards, so that forwards go first.
AFTER_FORWARDS = 1e6


class OrderedSchedule(ListedSchedule):
    """Schedule whose ranks take the ready task that a :class:`TaskOrder` prefers, within the plan's
    ``activation_limits`` if it has some.

    Attributes:
        patience: fraction of its seconds that a task which only fills bubbles must fit in.
    """

    patience: float = 0.0

    @abstractmethod
    def task_order(self, step: Any) -> TaskOrder:
        """Return the preferences for a step."""

    def listed(self, step: Any) -> Any:
        return self.run(step, self.task_order(step), step.plan.activation_limits)

    def run(self, step: Any, order: TaskOrder, limits: Any) -> Any:
        """Return the schedule of an order within bytes of activations per rank (None for no
        limits); raise ``NoPlanError`` if it does not fit."""
        policy = Policy((0, 1, 1, 2), self.patience)
        schedule = step.run(Rules(policy, byte_limits=limits, order=order))
        return step.timed(schedule) if order.seconds else schedule


def one_f_one_b_keys(step: Any) -> dict[Any, np.ndarray]:
    """Return keys by stage with which forwards go first, and then the oldest microbatch."""
    numbers = np.arange(step.num_microbatches, dtype=float)
    keys = np.array([numbers, AFTER_FORWARDS + numbers, 2 * AFTER_FORWARDS + numbers])
    return {stage.id: keys.copy() for stage in step.plan.stages}


def encoder_stages(plan: Any) -> tuple[Any, ...]:
    """Return the stages of the modules before the backbone."""
    before: set[str] = set()
    waiting = [plan.graph.backbone]
    while waiting:
        producers = set(plan.graph.producers(waiting.pop())) - before
        before |= producers
        waiting += producers
    return tuple(stage for stage in plan.stages if stage.module in before)
