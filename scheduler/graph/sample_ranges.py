"""Ranges of the samples of a batch: splitting, unions and intersections."""

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
        return max(0, self.hi - self.lo)

    def meet(self, other: Range) -> Range:
        """Return the samples in both ranges; the bounds of an empty result are arbitrary."""
        return Range(max(self.lo, other.lo), min(self.hi, other.hi))

    def holds(self, other: Range) -> bool:
        """Return True if ``other`` is contained in this range."""
        return self.lo <= other.lo and other.hi <= self.hi


def share(size: int, index: int, count: int) -> Range:
    """Return one of ``count`` consecutive shares of ``size`` samples whose sizes differ by at most
    one. Shares nest if one count divides the other: a coarse share is the union of finer shares."""
    return Range(index * size // count, (index + 1) * size // count)


def rows_of(samples: Range, offsets: Sequence[int] | None) -> Range:
    """Return the rows of samples in a tensor of the whole batch. ``offsets`` is (samples + 1,), the
    first row of each sample, followed by the number of rows; None means one row per sample."""
    return samples if offsets is None else Range(offsets[samples.lo], offsets[samples.hi])


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same samples as ascending ranges that neither overlap nor touch."""
    merged: list[Range] = []
    for current in sorted(r for r in ranges if r):
        if merged and current.lo <= merged[-1].hi:
            merged[-1] = Range(merged[-1].lo, max(merged[-1].hi, current.hi))
        else:
            merged.append(current)
    return tuple(merged)


def overlap(ranges: Iterable[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """Return the samples in both lists, as ascending ranges that neither overlap nor touch."""
    return union(r.meet(other) for r in ranges for other in others)
