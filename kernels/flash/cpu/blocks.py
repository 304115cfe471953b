"""Plan that cuts a mask into blocks of query rows and, per block, parts of the keys that it sees.

A part is a set of keys that all rows of the block see (no mask needed), a triangle (row i sees the
first i + 1 keys), or a set of keys that some rows see (a mask of rows x keys is made when the part
runs). Blocks follow the mask's segments, because rows of one segment share their bounds: an
isolated image is one block with one part. Segments share a block, even if they are not adjacent, if
they see the same keys (all images of an encoder) or are so short that separate calls would cost
more (small documents, text between small images).

Planning reads only the segment table. Its size does not depend on the sequence length, except for
the row arrays that give the masks of partial parts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary

import numpy as np
import torch

from raymm.kernels.mask.columns import ATTEND, BASES, IDENTITY, KEY_START, SLOPES, START
from raymm.kernels.mask.mask import AttentionMask

Ranges = list[tuple[int, int]]
"""Disjoint ascending ranges (first, index after the last)."""

# Measured with ATen's flash attention on AVX-512: per pair, a product of n rows takes
# (1 + ROW_COST / n) times as long as one of many rows, and a mask takes MASK_COST times as long.
ROW_COST = 20
MASK_COST = 1.2
# Cost of an additional run of rows or keys, as a fraction of a call.
RUN_COST = 0.25
# Segments with fewer than SMALL_ROWS rows may share a masked block of up to SHARED_ROWS rows.
SMALL_ROWS = 128
SHARED_ROWS = 256
# Rows per block of a triangle that needs a mask.
TRIANGLE_ROWS = 256
PLANS_PER_MASK = 4


class Kind(Enum):
    """Visibility of the keys of a part for the rows of a block."""

    FULL = "every row sees every key"
    CAUSAL = "row i sees keys 0 to i"
    MASKED = "some rows see some keys"


@dataclass(frozen=True)
class Part:
    """Keys that a block of rows sees; ``runs`` are ascending ranges (first key, index after the
    last), concatenated."""

    kind: Kind
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """Query rows, and the disjoint parts of the keys that they see; ``rows`` are ascending ranges
    (first row, index after the last), concatenated."""

    rows: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Limits:
    """Limits of the kernel that runs a plan.

    Attributes:
        overhead: cost of a call, in (row, key) pairs.
        triangles: True if the kernel has a causal mode.
        rows, keys: most rows of a block and keys of a part; 0 for no limit.
    """

    overhead: int = 2000
    triangles: bool = True
    rows: int = 0
    keys: int = 0


class Plan:
    """Blocks of a mask. Rows in no block see no key."""

    def __init__(self, mask: AttentionMask, limits: Limits) -> None:
        keys = MatchingKeys(mask)
        self.blocks = tuple(
            block for group in _shared(mask_regions(mask), keys, limits.overhead)
            for block in _blocks(group, keys, limits)
        )  # fmt: skip
        # Keep no reference to the mask: it would keep its own cache entry alive.
        masked = any(part.kind is Kind.MASKED for block in self.blocks for part in block.parts)
        self._rows = mask.rows() if masked else None
        self._needs_bits = mask.needs_bits

    def visible(self, block: Block, part: Part) -> torch.Tensor:
        """Return (rows, keys) bool of a masked part."""
        arrays = self._rows
        assert arrays is not None  # set if there is a masked part
        keys = torch.cat([torch.arange(*run, dtype=torch.int32) for run in part.runs])
        bounds = torch.cat([arrays.bounds[:, a:b] for a, b in block.rows], dim=1)
        lo1, hi1, lo2, hi2 = bounds.unsqueeze(-1)
        visible = (lo1 <= keys) & (keys < hi1)
        if (lo2 < hi2).any():
            visible |= (lo2 <= keys) & (keys < hi2)
        if self._needs_bits:
            # All rows of a block have equal attend bits.
            attend = arrays.attend[block.rows[0][0]]
            visible &= (torch.cat([arrays.identity[a:b] for a, b in part.runs]) & attend) != 0
        return visible


_plans: WeakKeyDictionary[AttentionMask, dict[Limits, Plan]] = WeakKeyDictionary()


def plan_blocks(mask: AttentionMask, limits: Limits) -> Plan:
    """Return the plan of a mask, cached while the mask lives, so that all layers share it."""
    plans = _plans.setdefault(mask, {})
    if limits not in plans:
        while len(plans) >= PLANS_PER_MASK:
            plans.pop(next(iter(plans)))
        plans[limits] = Plan(mask, limits)
    return plans[limits]


def _shared(
    regions: list[MaskRegion], keys: MatchingKeys, overhead: int
) -> Iterator[list[MaskRegion]]:
    """Yield groups of pieces that share a block: pieces that see the same keys, and small pieces
    where one masked call is cheaper than a call each. Pieces of a group have equal attend bits and
    need not be adjacent."""
    group: list[MaskRegion] = []
    cost, every, partly = 0.0, [], []
    for region in sorted(regions, key=lambda region: (region.attend, region.start)):
        joins = False
        if group and group[0].attend == region.attend:
            rows = sum(member.rows for member in group) + region.rows
            same = every == partly == region.every() == region.some()
            if same or (region.rows < SMALL_ROWS and rows <= SHARED_ROWS):
                both_every = intersect(every, region.every())
                both_some = union([*partly, *region.some()])
                joint = _cost(rows, len(group) + 1, both_every, both_some, region, keys, overhead)
                alone = _cost(region.rows, 1, region.every(), region.some(), region, keys, overhead)
                joins = joint < cost + alone
        if joins:
            group.append(region)
            cost, every, partly = joint, both_every, both_some
            continue
        if group:
            yield group
        group, every, partly = [region], region.every(), region.some()
        cost = _cost(region.rows, 1, every, partly, region, keys, overhead)
    if group:
        yield group


def _cost(
    rows: int, row_runs: int, every: Ranges, some: Ranges, region: MaskRegion, keys: MatchingKeys,
    overhead: int,
) -> float:  # fmt: skip
    """Return the cost of rows in pairs, overheads included: the cheaper of a full and a masked
    part, or one part that masks everything."""
    full, full_runs = keys.count(every, region.attend)
    seen, runs = keys.count(some, region.attend)
    masked_call = overhead + (rows + ROW_COST) * MASK_COST * seen + overhead * RUN_COST * runs
    separate = ((full > 0) + (seen > full)) * overhead + (rows + ROW_COST) * (
        full + MASK_COST * (seen - full)
    )
    separate += overhead * RUN_COST * (full_runs + (runs - full_runs + 1 if seen > full else 0))
    return min(masked_call, separate) + overhead * RUN_COST * row_runs


def _blocks(group: list[MaskRegion], keys: MatchingKeys, limits: Limits) -> Iterator[Block]:
    """Yield the blocks of a group of pieces."""
    if len(group) > 1:
        runs = union((region.start, region.stop) for region in group)
        for page in _pages(runs, limits.rows):
            regions = [
                region.cut(max(region.start, start), min(region.stop, stop))
                for start, stop in page
                for region in group
                if region.start < stop and start < region.stop
            ]
            yield from _block(page, _mixed(regions, keys), limits)
        return
    region = group[0]
    crossed = region.crossed()
    for start, stop in _cut(range(region.start, region.stop), _rows(region, crossed, keys, limits)):
        cut = region.cut(start, stop)
        parts = _mixed([cut], keys) if crossed else _exact(cut, keys, limits.triangles)
        yield from _block([(start, stop)], parts, limits)


def _rows(region: MaskRegion, crossed: bool, keys: MatchingKeys, limits: Limits) -> int:
    """Return the number of rows per block for a piece."""
    rows = region.rows
    growing = any(t for _, _, _, t in region.intervals)
    if crossed or any(s for _, _, s, _ in region.intervals):
        # A window: large blocks waste its corners, small blocks are slow.
        width = size(region.every()) or 1
        width = max(width, min(b - a + (t - s) * region.start for a, b, s, t in region.intervals))
        rows = min(
            (128, 192, 256, 384, 512),
            key=lambda n: (1 + ROW_COST / n) * (width + n) + 3 * limits.overhead / n,
        )
    elif growing:
        # A triangle needs a mask if some of its keys do not match.
        partly = region.some()
        holes = keys.count(partly, region.attend)[0] < size(partly)
        if holes or not limits.triangles:
            rows = TRIANGLE_ROWS
    return min(rows, limits.rows or rows)


def _exact(region: MaskRegion, keys: MatchingKeys, triangles: bool) -> dict[Kind, Ranges]:
    """Return the keys that one piece's rows see, by kind of part."""
    full, causal, masked = [], [], []
    first, last = region.start, region.stop - 1
    for a, b, s, t in region.intervals:
        lo, inner_lo, inner_hi, hi = a + s * first, a + s * last, b + t * first, b + t * last
        if inner_lo >= inner_hi:
            masked.append((lo, hi))
            continue
        masked.append((lo, inner_lo))
        triangle = (inner_hi - 1, hi)
        matching, _ = keys.count([triangle], region.attend)
        if t and first < last and triangles and matching == size([triangle]):
            full.append((inner_lo, inner_hi - 1))
            causal.append(triangle)
        else:
            full.append((inner_lo, inner_hi))
            masked.append((inner_hi, hi))
    return {
        Kind.FULL: keys.matching(union(full), region.attend),
        Kind.CAUSAL: causal,
        Kind.MASKED: keys.matching(union(masked), region.attend),
    }


def _mixed(regions: list[MaskRegion], keys: MatchingKeys) -> dict[Kind, Ranges]:
    """Return the keys that all rows see, and those that only some see, for equal attend bits."""
    attend, every = regions[0].attend, regions[0].every()
    for region in regions[1:]:
        every = intersect(every, region.every())
    partly = union(r for region in regions for r in region.some())
    return {
        Kind.FULL: keys.matching(every, attend),
        Kind.CAUSAL: [],
        Kind.MASKED: keys.matching(subtract(partly, every), attend),
    }


def _block(rows: Ranges, keys: dict[Kind, Ranges], limits: Limits) -> Iterator[Block]:
    """Yield the block of rows with these keys, if there are keys."""
    runs, causal = len(keys[Kind.FULL]) + len(keys[Kind.MASKED]), len(keys[Kind.CAUSAL])
    calls = bool(keys[Kind.FULL]) + causal + bool(keys[Kind.MASKED])
    if calls > 1:
        # Use one masked call if it is cheaper than several calls and a merge.
        joined = union(run for ranges in keys.values() for run in ranges)
        unmasked = size(keys[Kind.FULL]) + size(keys[Kind.CAUSAL])
        saved = calls - 1 + RUN_COST * (runs + causal - len(joined))
        if (size(rows) + ROW_COST) * unmasked * (MASK_COST - 1) < saved * limits.overhead:
            keys = {Kind.FULL: [], Kind.CAUSAL: [], Kind.MASKED: joined}
    parts = [Part(Kind.CAUSAL, (run,)) for run in keys[Kind.CAUSAL]]
    for kind in (Kind.FULL, Kind.MASKED):
        parts += [Part(kind, tuple(page)) for page in _pages(keys[kind], limits.keys)]
    if parts:
        yield Block(tuple(rows), tuple(parts))


def _pages(ranges: Ranges, most: int) -> Iterator[Ranges]:
    """Yield ranges in portions of at most ``most`` positions; 0 for a single portion."""
    page, room = [], most
    for start, stop in ranges:
        while most and stop - start >= room:
            yield [*page, (start, start + room)]
            start, page, room = start + room, [], most
        if start < stop:
            page.append((start, stop))
            room -= stop - start
    if page:
        yield page


def _cut(rows: range, most: int) -> Iterator[tuple[int, int]]:
    """Return even pieces of at most ``most`` rows."""
    regions = -(-len(rows) // most)
    edges = [rows.start + len(rows) * i // regions for i in range(regions + 1)]
    return zip(edges[:-1], edges[1:], strict=True)


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
