"""DIP's segments."""

from __future__ import annotations

from typing import Any

import numpy as np

from raymm.errors import NoPlanError
from raymm.scheduler.schedules.ordered import (
    OrderedSchedule,
    encoder_stages,
    one_f_one_b_keys,
)
from raymm.scheduler.schedules.policy import Rules, TaskOrder

# Microbatches per segment; lead of encoders in segments; delay of backwards as a fraction
# of the warm-up (0: backwards go first).
SEGMENTS, LEADS, DELAYS = (1, 2, 4), (0, 1, 2), (0.0, 0.5, 1.0)


class Dip(OrderedSchedule):
    """Segments of single modalities, whose order is searched for each batch (arXiv 2504.14145:
    dedicated pipeline segments, and schedules that are generated asynchronously per batch).

    Consecutive microbatches of an encoder are one segment, which a rank runs without alternating
    with the language model. Segments of all modalities interleave on the same ranks. A rank takes
    the older of a forward and a backward, where a backward counts as some microbatches younger. The
    length of segments, their lead and that delay are searched with the durations of the batch,
    within the plan's ``activation_limits``, or else the memory of 1F1B (which is the schedule if no
    combination fits).

    Left out: sub-microbatches that split a microbatch of one modality, the tree search over single
    segments (27 combinations are tried), and the choice of recomputation per layer.
    """

    name = "dip"

    def task_order(self, step: Any) -> TaskOrder:
        return _segments(step, SEGMENTS[0], LEADS[0], DELAYS[-1])

    def listed(self, step: Any) -> Any:
        baseline = step.run(Rules())
        if step.forward_only:
            return baseline
        limits = step.plan.activation_limits or step.equal_limits(baseline)
        best, stuck = None, None
        for choice in [(s, n, d) for s in SEGMENTS for n in LEADS for d in DELAYS]:
            try:
                schedule = step.timed(self.run(step, _segments(step, *choice), limits))
            except NoPlanError as error:
                stuck = error
                continue
            if best is None or schedule.makespan < best.makespan:
                best = schedule
        if best is None and step.plan.activation_limits is None:
            return baseline
        if best is None:
            assert stuck is not None  # every combination failed
            raise stuck
        return best


def _segments(step: Any, size: int, lead: int, delay: float) -> TaskOrder:
    plan, keys = step.plan, one_f_one_b_keys(step)
    numbers = np.arange(step.num_microbatches, dtype=float)
    for name, key in keys.items():
        key[0] = numbers
        key[1] = numbers + delay * plan.warm_up[name] - 0.5
    ahead = {name: 2 * held for name, held in plan.warm_up.items()}
    first = numbers // size * size
    for stage in encoder_stages(plan):
        keys[stage.id][0] = first - lead * size - 0.25
        keys[stage.id][1] = first + size - 1 + delay * plan.warm_up[stage.id] - 0.75
        ahead[stage.id] += (lead + 1) * size
    return TaskOrder(keys, ahead)
