"""BigMac's nested pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np

from raymm.scheduler.schedules.ordered import (
    OrderedSchedule,
    encoder_stages,
    one_f_one_b_keys,
)
from raymm.scheduler.schedules.policy import TaskOrder


class BigMac(OrderedSchedule):
    """Encoders nested in the pipeline of the language model (arXiv 2605.25451, nested pipeline
    structure).

    The replicas of an encoder, one per rank of the language model, take a group of consecutive
    microbatches, one each. A group's forwards run while the language model works on the group
    before, and each backward runs as soon as its gradient arrives. A replica holds only the
    microbatches that the language model has in flight, divided by the replicas, and one more: a
    number that does not depend on the number of microbatches, while the activations of the language
    model are those of 1F1B. Modules after the language model run within its last stage.

    Left out: generators with replicas on all ranks, and the paper's choice of degrees.
    """

    name = "bigmac"

    def task_order(self, step: Any) -> TaskOrder:
        plan, keys = step.plan, one_f_one_b_keys(step)
        ahead = dict(plan.warm_up)
        in_flight = max(
            (plan.warm_up[stage.id] for stage in plan.module_stages(plan.graph.backbone)), default=1
        )
        numbers = np.arange(step.num_microbatches)
        for stage in encoder_stages(plan):
            replicas = len(plan.replicas(stage.module))
            keys[stage.id][0] = (numbers // replicas - 1) * replicas - 0.5
            ahead[stage.id] = min(ahead[stage.id], -(-in_flight // replicas) + 1)
        return TaskOrder(keys, ahead)
