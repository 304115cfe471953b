"""Entrain's deferral."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from raymm.scheduler.schedules.ordered import (
    AFTER_FORWARDS,
    OrderedSchedule,
    encoder_stages,
    one_f_one_b_keys,
)
from raymm.scheduler.schedules.policy import TaskOrder


class Entrain(OrderedSchedule):
    """1F1B in which excess work of encoders is deferred within the step (arXiv 2605.27918, its
    microbatch assignment).

    A microbatch with more encoder work than the mean delays its language model under 1F1B, because
    the encoder may not be further ahead than its depth. Here an encoder may be ahead by as many
    further microbatches as its cumulative work deviates from a steady pace, and its backwards are
    deferred behind those of the language model. Without deviations this is 1F1B.

    Left out: moving single samples to a later microbatch of the language model, since all modules
    have the same microbatches, and the paper's search for one static layout, for which there is
    ``raymm plan``.
    """

    name = "entrain"

    def task_order(self, step: Any) -> TaskOrder:
        plan, keys = step.plan, one_f_one_b_keys(step)
        ahead = dict(plan.warm_up)
        for stage in encoder_stages(plan):
            ahead[stage.id] += _deferred(step.loads.get(stage.module))
            keys[stage.id][1] += AFTER_FORWARDS / 2
        return TaskOrder(keys, ahead)


def _deferred(loads: Any) -> int:
    """Return the range of cumulative work around a steady pace, in microbatches."""
    if loads is None or not len(loads) or not np.sum(loads):
        return 0
    deviations = np.cumsum(np.asarray(loads) / np.mean(loads) - 1)
    return ceil(max(0.0, deviations.max()) - min(0.0, deviations.min()) - 1e-9)
