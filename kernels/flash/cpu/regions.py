"""A mask's segments as pieces with exact bounds, and sets of keys as ranges.

The planner of :mod:`raymm.kernels.flash.cpu.blocks` uses pieces of rows whose intervals are not
clipped and neither vanish nor touch within the piece, and counts and runs of keys that match attend
bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from raymm.kernels.mask.columns import ATTEND, BASES, IDENTITY, KEY_START, SLOPES, START
from raymm.kernels.mask.mask import AttentionMask

Ranges = list[tuple[int, int]]
"""Disjoint ascending ranges (first, index after the last)."""


@dataclass(frozen=True)
class MaskRegion:
    """Rows whose one or two intervals are disjoint, never empty and affine: (base of lo, base of
    hi, slope of lo, slope of hi)."""

    start: int
    stop: int
    attend: int
    intervals: tuple[tuple[int, int, int, int], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> MaskRegion:
        """Return the part with rows [start, stop)."""
        return MaskRegion(start, stop, self.attend, self.intervals)

    def some(self) -> Ranges:
        """Return the keys within an interval of some row, ignoring bits."""
        last = self.stop - 1
        return union([(a + s * self.start, b + t * last) for a, b, s, t in self.intervals])

    def every(self) -> Ranges:
        """Return the keys within the same interval of every row."""
        last = self.stop - 1
        return union([(a + s * last, b + t * self.start) for a, b, s, t in self.intervals])

    def crossed(self) -> bool:
        """Return True if a key may be in one interval of a row and in the other interval of another
        row."""
        return size(self.some()) < sum(
            b + t * (self.stop - 1) - a - s * self.start for a, b, s, t in self.intervals
        )


def mask_regions(mask: AttentionMask) -> list[MaskRegion]:
    """Return the mask's segments, split where a bound is clipped and where intervals become empty
    or touch. Touching intervals are merged, and segments without keys are left out."""
    start, stop, end = mask.query_table[:, START], mask.query_stops, mask.n_keys
    bases, slopes = mask.query_table[:, BASES], mask.query_table[:, SLOPES]
    segment, start, stop = _split(start, stop, np.concatenate(
        [np.where(slopes == 1, edge - bases, -1) for edge in (0, end)], axis=1
    ))  # fmt: skip
    attend, bases, slopes = mask.query_table[segment, ATTEND], bases[segment], slopes[segment]
    value = bases + slopes * start[:, None]
    below, above = value < 0, value + slopes > end
    bases = np.where(below, 0, np.where(above, end, bases))
    slopes = np.where(below | above, 0, slopes)
    changes = []
    for x, y, equal in ((0, 1, 0), (2, 3, 0), (0, 3, 1), (2, 1, 1), (0, 2, 0), (1, 3, 0)):
        # The comparison bound x < bound y (or <=) changes at one row if exactly one bound moves.
        ceases = bases[:, y] - bases[:, x] + equal
        begins = bases[:, x] - bases[:, y] + 1 - equal
        order = slopes[:, x] - slopes[:, y]
        changes.append(np.where(order > 0, ceases, np.where(order < 0, begins, -1)))
    segment, start, stop = _split(start, stop, np.stack(changes, axis=1))
    regions: list[MaskRegion] = []
    for first, row_stop, bits, base, slope in zip(
        start.tolist(), stop.tolist(), attend[segment].tolist(), bases[segment].tolist(),
        slopes[segment].tolist(), strict=True,
    ):  # fmt: skip
        intervals = _disjoint(first, base, slope) if bits else ()
        last = regions[-1] if regions else None
        if last and (last.stop, last.attend, last.intervals) == (first, bits, intervals):
            regions[-1] = last.cut(last.start, row_stop)
        elif intervals:
            regions.append(MaskRegion(first, row_stop, bits, intervals))
    return regions


def _split(
    start: np.ndarray, stop: np.ndarray, changes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split segments (S,) at those of their ``changes`` (S, C) that lie inside. Return the segment,
    start and stop of every piece."""
    segment, column = np.nonzero((changes > start[:, None]) & (changes < stop[:, None]))
    regions = np.concatenate([
        np.stack([np.arange(len(start)), start], axis=1),
        np.stack([segment, changes[segment, column]], axis=1),
    ])  # fmt: skip
    regions = np.unique(regions, axis=0)
    segment, first = regions[:, 0], regions[:, 1]
    last = np.append(segment[1:] != segment[:-1], True)
    return segment, first, np.where(last, stop[segment], np.append(first[1:], 0))


def _disjoint(
    row: int, base: list[int], slope: list[int]
) -> tuple[tuple[int, int, int, int], ...]:
    """Return a piece's intervals from its clipped bounds, whose order is the same in all rows."""
    a, b, c, d = (x + s * row for x, s in zip(base, slope, strict=True))
    first = (base[0], base[1], slope[0], slope[1])
    second = (base[2], base[3], slope[2], slope[3])
    if a >= b:
        return (second,) if c < d else ()
    if c >= d:
        return (first,)
    if a <= d and c <= b:
        lo, hi = (0 if a < c or (a == c and not slope[0]) else 2), (1 if b > d else 3)
        if b == d and slope[1]:
            hi = 1
        return ((base[lo], base[hi], slope[lo], slope[hi]),)
    return (first, second) if a < c else (second, first)


class MatchingKeys:
    """Counts and runs of the keys that match attend bits, from the key segments."""

    def __init__(self, mask: AttentionMask) -> None:
        self._all = not mask.needs_bits
        self._identity = mask.key_table[:, IDENTITY]
        self._edges = np.append(mask.key_table[:, KEY_START], mask.n_keys)
        self._matches: dict[int, tuple[list[int], list[int], list[int]]] = {}

    def count(self, ranges: Ranges, attend: int) -> tuple[int, int]:
        """Return the number of keys in ``ranges`` that match, and about how many runs they form."""
        if self._all or not ranges:
            return size(ranges), len(ranges)
        starts, stops, cumulative = self._match(attend)
        keys = runs = 0
        for start, stop in ranges:
            first = bisect_right(stops, start)
            last = bisect_left(starts, stop)
            if first < last:
                keys += cumulative[last] - cumulative[first]
                keys -= max(start - starts[first], 0) + max(stops[last - 1] - stop, 0)
                runs += last - first
        return keys, runs

    def matching(self, ranges: Ranges, attend: int) -> Ranges:
        """Return the keys of ``ranges`` that match."""
        if self._all:
            return ranges
        starts, stops, _ = self._match(attend)
        return [
            (max(start, starts[i]), min(stop, stops[i]))
            for start, stop in ranges
            for i in range(bisect_right(stops, start), bisect_left(starts, stop))
        ]

    def _match(self, attend: int) -> tuple[list[int], list[int], list[int]]:
        """Return the runs of keys that match, and the number of keys in earlier runs."""
        if attend not in self._matches:
            edges = np.flatnonzero(np.diff((self._identity & attend) != 0, prepend=0, append=0))
            starts, stops = self._edges[edges[::2]], self._edges[edges[1::2]]
            cumulative = np.concatenate([[0], np.cumsum(stops - starts)])
            self._matches[attend] = starts.tolist(), stops.tolist(), cumulative.tolist()
        return self._matches[attend]


def size(ranges: Ranges) -> int:
    """Return the number of positions in all ranges."""
    return sum(stop - start for start, stop in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return disjoint ascending ranges that cover the same keys."""
    merged: Ranges = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def intersect(first: Ranges, second: Ranges) -> Ranges:
    """Return the positions in both."""
    return union((max(a, c), min(b, d)) for a, b in first for c, d in second)


def subtract(ranges: Ranges, taken: Sequence[tuple[int, int]]) -> Ranges:
    """Return the positions of ``ranges`` outside ``taken``; both are disjoint and ascending."""
    remaining, i = [], 0
    for start, stop in ranges:
        while i < len(taken) and taken[i][1] <= start:
            i += 1
        j = i
        while j < len(taken) and taken[j][0] < stop:
            if start < taken[j][0]:
                remaining.append((start, taken[j][0]))
            start = max(start, taken[j][1])
            j += 1
        if start < stop:
            remaining.append((start, stop))
    return remaining
