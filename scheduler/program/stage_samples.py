"""What of a microbatch's samples a stage works on, reads and gets."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.graph.sample_ranges import Range, share, union
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES


def stage_samples(plan: Plan, stage: Stage, size: int) -> Range:
    """The samples of a microbatch that a stage works on, if the microbatch goes through it.

    Args:
        plan: whose stage it is.
        stage: which.
        size: samples of the microbatch.
    """
    if stage.split != SAMPLES:
        return Range(0, size)
    return share(size, stage.replica, len(plan.replicas(stage.module)))


def needed_samples(plan: Plan, producer: str, consumer: Stage, size: int) -> Range:
    """The samples of a microbatch of which a stage reads what a module makes.

    Args:
        plan: whose stage it is.
        producer: the module.
        consumer: the stage.
        size: samples of the microbatch.
    """
    if (producer, consumer.module) in plan.graph.every:
        return Range(0, size)
    return stage_samples(plan, consumer, size)


def carried_samples(
    plan: Plan, producer: StageId, consumers: Sequence[StageId], size: int
) -> tuple[Range, ...]:
    """Of which samples a rank gets what a stage makes: those that any of its stages reads, each
    once; ascending ranges that do not touch.

    Args:
        plan: whose stages they are.
        producer: who makes it.
        consumers: who reads it on the rank.
        size: samples of the microbatch.
    """
    own = stage_samples(plan, plan.by_id[producer], size)
    return union(
        own.meet(needed_samples(plan, producer.module, plan.by_id[consumer], size))
        for consumer in consumers
    )
