"""Megatron MIMO's schedules: encoders on separate ranks, or on the ranks of the language model."""

from __future__ import annotations

from typing import Any

import numpy as np

from raymm.errors import NoPlanError
from raymm.scheduler.schedules.ordered import (
    OrderedSchedule,
    encoder_stages,
    one_f_one_b_keys,
)
from raymm.scheduler.schedules.policy import TaskOrder


class MimoNonColocated(OrderedSchedule):
    """1F1B over the pipelines of several modules on disjoint ranks, without durations (arXiv
    2605.27678, "Heterogeneous Parallelism for Multimodal Large Language Model Training", execution
    on disjoint rank sets).

    The pipeline of each module warms up by the longest path of its stages to the loss, through the
    pipelines that it feeds. The order is that of stages that all take equally long for their share
    of a step, so that it is known before a step: a slow microbatch delays all ranks behind it.

    Left out: the layout transforms at module boundaries, which raymm's messages do for any degrees.
    """

    name = "mimo"

    def task_order(self, step: Any) -> TaskOrder:
        plan = step.plan
        # With n replicas, each runs every n-th microbatch, so one may take n times as long.
        counts = {stage.id: len(plan.replicas(stage.module)) for stage in plan.stages}
        seconds = {name: (1.0 * count, 2.0 * count) for name, count in counts.items()}
        return TaskOrder(one_f_one_b_keys(step), plan.warm_up, seconds=seconds)


class MimoColocated(OrderedSchedule):
    """Three phases on shared ranks (arXiv 2605.27678, colocated execution).

    A rank runs the forwards of its encoders on all microbatches, then the language model under
    1F1B, then the backwards of its encoders. Modules never alternate, so each runs under its own
    layout, but encoders hold the activations of all microbatches. If these do not fit in the plan's
    ``activation_limits``, the step is divided in rounds, as few as fit, with the three phases in
    each.

    Left out: encoders that recompute their forward before the third phase (set ``recompute``).
    """

    name = "mimo_colocated"

    def task_order(self, step: Any) -> TaskOrder:
        return _three_phases(step, max(1, step.num_microbatches))

    def listed(self, step: Any) -> Any:
        limits = step.plan.activation_limits
        round_size = max(1, step.num_microbatches)
        while True:
            try:
                return self.run(step, _three_phases(step, round_size), limits)
            except NoPlanError:
                if round_size == 1:
                    raise
                round_size = (round_size + 1) // 2


def _three_phases(step: Any, round_size: int) -> TaskOrder:
    """Return the order with three phases for each ``round_size`` microbatches."""
    plan, rounds = step.plan, np.arange(step.num_microbatches) // round_size
    phases = {stage.id: np.array([3 * rounds + 1, 3 * rounds + 1]) for stage in plan.stages}
    ahead = dict(plan.warm_up)
    for stage in encoder_stages(plan):
        phases[stage.id] = np.array([3 * rounds, 3 * rounds + 2])
        ahead[stage.id] = max(1, step.num_microbatches)
    return TaskOrder(one_f_one_b_keys(step), ahead, phases)
