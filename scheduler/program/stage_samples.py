"""What of a microbatch's samples a stage works on, reads and gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymm.scheduler.graph.sample_ranges import Range, overlap, rows_of, share, union
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES


class Samples(NamedTuple):
    """A microbatch's samples.

    Attributes:
        size: how many.
        filled: of modules that have something of some samples only, these: ascending ranges that
            do not touch. All others have something of every one.
    """

    size: int
    filled: tuple[tuple[str, tuple[Range, ...]], ...] = ()

    def of(self, module: str) -> tuple[Range, ...]:
        """Those that a module has something of."""
        for name, ranges in self.filled:
            if name == module:
                return ranges
        return (Range(0, self.size),)


def filled_samples(plan: Plan, size: int, offsets: Mapping[str, Sequence[int]]) -> Samples:
    """A microbatch's samples, in ranges as coarse as the plan's shares of them, so that few step
    programs do for many batches.

    Args:
        plan: that splits samples.
        size: of the microbatch.
        offsets: by module that has any number of rows of a sample, each sample's first row, and
            behind the last one the number of rows.
    """
    counts = {len(plan.replicas(s.module)) for s in plan.stages if s.split == SAMPLES}
    ends = sorted({index * size // count for count in counts for index in range(count + 1)})
    parts = [Range(lo, hi) for lo, hi in zip(ends, ends[1:], strict=False)]
    return Samples(size, tuple(
        (module, union(part for part in parts if rows_of(part, of_module)))
        for module, of_module in offsets.items()
    ))


def stage_samples(plan: Plan, stage: Stage, samples: Samples) -> tuple[Range, ...]:
    """The samples of a microbatch that a stage works on, if the microbatch goes through it.

    Args:
        plan: whose stage it is.
        stage: which.
        samples: of the microbatch.
    """
    own = Range(0, samples.size)
    if stage.split == SAMPLES:
        own = share(samples.size, stage.replica, len(plan.replicas(stage.module)))
    return overlap((own,), samples.of(stage.module))


def needed_samples(
    plan: Plan, producer: str, consumer: Stage, samples: Samples
) -> tuple[Range, ...]:
    """The samples of a microbatch of which a stage reads what a module makes.

    Args:
        plan: whose stage it is.
        producer: the module.
        consumer: the stage.
        samples: of the microbatch.
    """
    has = samples.of(producer)
    if (producer, consumer.module) in plan.graph.every:
        return has
    return overlap(stage_samples(plan, consumer, samples), has)


def carried_samples(
    plan: Plan, producer: StageId, consumers: Sequence[StageId], samples: Samples
) -> tuple[Range, ...]:
    """Of which samples a rank gets what a stage makes: those that any of its stages reads, each
    once; ascending ranges that do not touch.

    Args:
        plan: whose stages they are.
        producer: who makes it.
        consumers: who reads it on the rank.
        samples: of the microbatch.
    """
    own = stage_samples(plan, plan.by_id[producer], samples)
    return union(
        part for consumer in consumers
        for part in overlap(
            needed_samples(plan, producer.module, plan.by_id[consumer], samples), own
        )
    )
