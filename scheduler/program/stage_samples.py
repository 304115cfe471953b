"""Samples of a microbatch that a stage runs on, reads and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymm.scheduler.graph.sample_ranges import Range, overlap, rows_of, share, union
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES


class Samples(NamedTuple):
    """Samples of a microbatch. ``filled`` has ascending ranges that do not touch, of the samples
    with data for a module, for modules that have data for some samples only."""

    size: int
    filled: tuple[tuple[str, tuple[Range, ...]], ...] = ()

    def of(self, module: str) -> tuple[Range, ...]:
        for name, ranges in self.filled:
            if name == module:
                return ranges
        return (Range(0, self.size),)


def filled_samples(plan: Plan, size: int, offsets: Mapping[str, Sequence[int]]) -> Samples:
    """Return the ``size`` samples of a microbatch, in ranges as coarse as the plan's shares, so
    that few step programs serve many batches. ``offsets`` is (samples + 1,), the first row of each
    sample followed by the number of rows; by module, for modules with any number of rows per
    sample."""
    counts = {len(plan.replicas(s.module)) for s in plan.stages if s.split == SAMPLES}
    ends = sorted({index * size // count for count in counts for index in range(count + 1)})
    ranges = [Range(lo, hi) for lo, hi in zip(ends, ends[1:], strict=False)]
    return Samples(size, tuple(
        (module, union(samples for samples in ranges if rows_of(samples, module_offsets)))
        for module, module_offsets in offsets.items()
    ))


def stage_samples(plan: Plan, stage: Stage, samples: Samples) -> tuple[Range, ...]:
    """Return the samples that a stage runs on, if the microbatch goes through it."""
    assigned = Range(0, samples.size)
    if stage.split == SAMPLES:
        assigned = share(samples.size, stage.replica, len(plan.replicas(stage.module)))
    return overlap((assigned,), samples.of(stage.module))


def needed_samples(
    plan: Plan, producer: str, consumer: Stage, samples: Samples
) -> tuple[Range, ...]:
    """Return the samples for which a stage reads the output of module ``producer``."""
    has = samples.of(producer)
    if (producer, consumer.module) in plan.graph.every:
        return has
    return overlap(stage_samples(plan, consumer, samples), has)


def carried_samples(
    plan: Plan, producer: StageId, consumers: Sequence[StageId], samples: Samples
) -> tuple[Range, ...]:
    """Return the samples of a producer's output that a rank with these consumers receives: each
    sample that any of them reads, once, as ascending ranges that do not touch."""
    output = stage_samples(plan, plan.by_id[producer], samples)
    return union(
        common for consumer in consumers
        for common in overlap(
            needed_samples(plan, producer.module, plan.by_id[consumer], samples), output
        )
    )
