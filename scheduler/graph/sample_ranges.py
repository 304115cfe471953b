"""Ranges of a batch's samples: dealing them out, unions and intersections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Samples ``lo`` to ``hi - 1`` of the batch."""

    lo: int
    hi: int

    def __bool__(self) -> bool:
        return self.lo < self.hi

    @property
    def size(self) -> int:
        """How many samples."""
        return max(0, self.hi - self.lo)

    def meet(self, other: Range) -> Range:
        """Samples in both; an empty range has no particular bounds."""
        return Range(max(self.lo, other.lo), min(self.hi, other.hi))

    def holds(self, other: Range) -> bool:
        """Whether all of the other's samples are in this one."""
        return self.lo <= other.lo and other.hi <= self.hi


def share(size: int, index: int, count: int) -> Range:
    """Of so many samples, one of ``count`` consecutive shares whose sizes differ by at most one;
    some are empty where there are fewer samples than shares.

    Shares of counts that divide each other nest, whatever the size: what several of the finer
    have is what one of the coarser has.

    Args:
        size: samples.
        index: of the share.
        count: shares.
    """
    return Range(index * size // count, (index + 1) * size // count)


def rows_of(samples: Range, offsets: Sequence[int] | None) -> Range:
    """Where samples' rows are in a tensor of the whole batch.

    Args:
        samples: of the batch.
        offsets: by sample, its first row, and behind the last one the number of rows; None: a
            row per sample.
    """
    return samples if offsets is None else Range(offsets[samples.lo], offsets[samples.hi])


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same samples as ascending ranges that neither overlap nor touch."""
    merged: list[Range] = []
    for part in sorted(r for r in ranges if r):
        if merged and part.lo <= merged[-1].hi:
            merged[-1] = Range(merged[-1].lo, max(merged[-1].hi, part.hi))
        else:
            merged.append(part)
    return tuple(merged)


def overlap(ranges: Iterable[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """The samples that are in both, as ascending ranges that neither overlap nor touch.

    Args:
        ranges, others: of samples.
    """
    return union(r.meet(other) for r in ranges for other in others)
