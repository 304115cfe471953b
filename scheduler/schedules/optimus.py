"""Optimus' bubble filling."""

from __future__ import annotations

from typing import Any

from raymm.scheduler.schedules.ordered import (
    OrderedSchedule,
    encoder_stages,
    one_f_one_b_keys,
)
from raymm.scheduler.schedules.policy import FILLS_BUBBLES, TaskOrder


class Optimus(OrderedSchedule):
    """Encoders that run only in the bubbles of the language model (Feng et al. 2025, arXiv
    2408.03505, bubble scheduling at the grain of stages).

    The language model runs under 1F1B. A rank begins a task of an encoder only if nothing of the
    language model is ready, nor will be before the task ends. Encoders may be ahead by twice their
    depth, so that they find work in early bubbles. Made for encoders with replicas on all ranks.

    Left out: single kernels of encoder layers in the bubbles of tensor parallelism, and the joint
    search for the layouts of encoder and language model.
    """

    name = "optimus"
    patience = 1.0

    def task_order(self, step: Any) -> TaskOrder:
        plan, keys = step.plan, one_f_one_b_keys(step)
        ahead = dict(plan.warm_up)
        for stage in encoder_stages(plan):
            keys[stage.id][:2] += FILLS_BUBBLES
            ahead[stage.id] *= 2
        return TaskOrder(keys, ahead)
