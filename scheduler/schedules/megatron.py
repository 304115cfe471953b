"""Megatron-LM's 1F1B with the encoders in the first stage of the language model."""

from __future__ import annotations

from typing import Any

from raymm.scheduler.schedules.ordered import OrderedSchedule, one_f_one_b_keys
from raymm.scheduler.schedules.policy import TaskOrder


class Megatron(OrderedSchedule):
    """1F1B that counts ranks and knows no durations (Narayanan et al. 2021, §2.2.1,
    "PipeDream-Flush").

    All stages of a rank are one pipeline stage, as if the encoders were more layers in front of the
    language model: the rank runs them in sequence on each microbatch, and warms up by its distance
    to the loss in ranks. The order is that of equal durations per rank, so it does not react to a
    slow tower or a long microbatch. Made for layouts with the encoders on the first rank of the
    language model (``scheduler/search/layouts.py``, ``colocated``).

    Left out: interleaved chunks, for which 1F1B of the stage graph is used.
    """

    name = "megatron"

    def task_order(self, step: Any) -> TaskOrder:
        plan = step.plan
        seconds = {}
        for stage in plan.stages:
            share = len(plan.rank_stages(stage.rank))
            seconds[stage.id] = (1.0 / share, 2.0 / share)
        return TaskOrder(one_f_one_b_keys(step), _distance_in_ranks(plan), seconds=seconds)


def _distance_in_ranks(plan: Any) -> dict[Any, int]:
    """Return the ranks on the longest path from each stage to the loss; more where a consumer has
    more replicas, so that all of them are busy."""
    distance: dict[Any, int] = {}
    for stage in reversed(plan.topological_stages):
        count, longest = len(plan.replicas(stage.module)), 0
        for name in plan.stage_consumers[stage.id]:
            consumer = plan.by_id[name]
            replicas = max(1, len(plan.replicas(consumer.module)) // count)
            longest = max(longest, distance[name] * replicas - (consumer.rank == stage.rank))
        distance[stage.id] = 1 + longest
    return distance
