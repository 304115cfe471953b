"""Cuts a mask into blocks of query rows and, per block, the parts of the keys it sees.

A part is keys that all rows of the block see (no mask needed), a triangle (row i sees the
first i + 1 keys), or keys that some rows see (a mask of rows x keys is made when the part
runs). Blocks follow the mask's segments, because rows of one segment share their bounds: an
isolated image is one block with one part. Segments share a block, also where they lie apart,
if they see the same keys (all images of an encoder) or are so short that a call for each
would cost more (small documents, text between small images).

Planning reads the segment table only; nothing here is as long as the sequence, except the
row arrays that masks of partial parts are made from.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary

import numpy as np
import torch

from raymm.kernels.mask import ATTEND, BASES, IDENTITY, KEY_START, SLOPES, START, AttentionMask

Ranges = list[tuple[int, int]]

# A matrix product of n rows takes about (1 + ROW_COST / n) times as long per pair as one of
# many rows, and adding a mask this much longer (ATen's flash attention, AVX-512).
ROW_COST = 20
MASK_COST = 1.2
# A further run of rows or keys takes this share of a call.
RUN_COST = 0.25
# Segments with fewer rows than this may share a block that needs a mask, of so many rows.
SMALL_ROWS = 128
SHARED_ROWS = 256
# Triangles up to this size are computed whole by ATen (its tiles have 512 keys), so they are
# cut into smaller ones; larger ones it handles well itself.
CUT_TRIANGLE = 1536
TRIANGLE_ROWS = 256
PLANS_PER_MASK = 4


class Kind(Enum):
    """How the rows of a block see the keys of a part."""

    FULL = "every row sees every key"
    CAUSAL = "row i sees keys 0 to i"
    MASKED = "some rows see some keys"


@dataclass(frozen=True)
class Part:
    """Keys that a block of rows sees.

    Attributes:
        runs: ascending (first key, one past the last); put one after another.
    """

    kind: Kind
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """Query rows, and the disjoint parts of the keys that they see.

    Attributes:
        rows: ascending (first row, one past the last); put one after another.
    """

    rows: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Limits:
    """What suits the kernel that runs a plan.

    Attributes:
        overhead: cost of a call, in (row, key) pairs.
        triangles: whether the kernel has a causal mode.
        rows, keys: most rows of a block and keys of a part; 0 for any number.
    """

    overhead: int = 2000
    triangles: bool = True
    rows: int = 0
    keys: int = 0


class Plan:
    """Blocks of a mask; rows in no block see nothing."""

    def __init__(self, mask: AttentionMask, limits: Limits) -> None:
        keys = _Keys(mask)
        self.blocks = tuple(
            block for group in _shared(_atoms(mask), keys, limits.overhead)
            for block in _blocks(group, keys, limits)
        )  # fmt: skip
        # The mask itself must not be kept: plans live for as long as their mask.
        masked = any(part.kind is Kind.MASKED for block in self.blocks for part in block.parts)
        self._rows = mask.rows() if masked else None
        self._needs_bits = mask.needs_bits

    def visible(self, block: Block, part: Part) -> torch.Tensor:
        """(rows, keys) bool of a masked part."""
        arrays = self._rows
        keys = torch.cat([torch.arange(*run, dtype=torch.int32) for run in part.runs])
        bounds = torch.cat([arrays.bounds[:, a:b] for a, b in block.rows], dim=1)
        lo1, hi1, lo2, hi2 = bounds.unsqueeze(-1)
        visible = (lo1 <= keys) & (keys < hi1)
        if (lo2 < hi2).any():
            visible |= (lo2 <= keys) & (keys < hi2)
        if self._needs_bits:
            # Rows of a block have the same attend bits.
            attend = arrays.attend[block.rows[0][0]]
            visible &= (torch.cat([arrays.identity[a:b] for a, b in part.runs]) & attend) != 0
        return visible


_plans: WeakKeyDictionary[AttentionMask, dict[Limits, Plan]] = WeakKeyDictionary()


def plan_blocks(mask: AttentionMask, limits: Limits) -> Plan:
    """The plan of a mask; kept while the mask lives, so that all layers share it."""
    plans = _plans.setdefault(mask, {})
    if limits not in plans:
        while len(plans) >= PLANS_PER_MASK:
            plans.pop(next(iter(plans)))
        plans[limits] = Plan(mask, limits)
    return plans[limits]


@dataclass(frozen=True)
class _Atom:
    """Rows whose one or two intervals are disjoint, never empty and affine: (base of lo, base
    of hi, slope of lo, slope of hi)."""

    start: int
    stop: int
    attend: int
    intervals: tuple[tuple[int, int, int, int], ...]

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> _Atom:
        return _Atom(start, stop, self.attend, self.intervals)

    def some(self) -> Ranges:
        """Keys of which each is within an interval of some row, bits aside."""
        last = self.stop - 1
        return _union([(a + s * self.start, b + t * last) for a, b, s, t in self.intervals])

    def every(self) -> Ranges:
        """Keys within one interval of every row (the same interval)."""
        last = self.stop - 1
        return _union([(a + s * last, b + t * self.start) for a, b, s, t in self.intervals])

    def still(self) -> bool:
        """Whether all rows have the same bounds."""
        return not any(s or t for _, _, s, t in self.intervals)

    def crossed(self) -> bool:
        """Whether a key may be in one interval of a row and in the other of another row."""
        return _size(self.some()) < sum(
            b + t * (self.stop - 1) - a - s * self.start for a, b, s, t in self.intervals
        )


def _atoms(mask: AttentionMask) -> list[_Atom]:
    """The mask's segments, cut where a bound is clipped and where intervals begin to be empty
    or to touch, with touching intervals joined. Segments that see nothing are left out."""
    start, stop, size = mask.query_table[:, START], mask.query_stops, mask.n_keys
    bases, slopes = mask.query_table[:, BASES], mask.query_table[:, SLOPES]
    segment, start, stop = _split(start, stop, np.concatenate(
        [np.where(slopes == 1, edge - bases, -1) for edge in (0, size)], axis=1
    ))  # fmt: skip
    attend, bases, slopes = mask.query_table[segment, ATTEND], bases[segment], slopes[segment]
    value = bases + slopes * start[:, None]
    below, above = value < 0, value + slopes > size
    bases = np.where(below, 0, np.where(above, size, bases))
    slopes = np.where(below | above, 0, slopes)
    changes = []
    for x, y, equal in ((0, 1, 0), (2, 3, 0), (0, 3, 1), (2, 1, 1), (0, 2, 0), (1, 3, 0)):
        # Bound x < bound y (or <=) begins or ceases to hold at one row if one of them moves.
        ceases = bases[:, y] - bases[:, x] + equal
        begins = bases[:, x] - bases[:, y] + 1 - equal
        order = slopes[:, x] - slopes[:, y]
        changes.append(np.where(order > 0, ceases, np.where(order < 0, begins, -1)))
    segment, start, stop = _split(start, stop, np.stack(changes, axis=1))
    atoms: list[_Atom] = []
    for first, end, bits, base, slope in zip(
        start.tolist(), stop.tolist(), attend[segment].tolist(), bases[segment].tolist(),
        slopes[segment].tolist(), strict=True,
    ):  # fmt: skip
        intervals = _disjoint(first, base, slope) if bits else ()
        last = atoms[-1] if atoms else None
        if last and (last.stop, last.attend, last.intervals) == (first, bits, intervals):
            atoms[-1] = last.cut(last.start, end)
        elif intervals:
            atoms.append(_Atom(first, end, bits, intervals))
    return atoms


def _split(
    start: np.ndarray, stop: np.ndarray, changes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut segments (S,) at those of their ``changes`` (S, C) that lie inside; the segment,
    start and stop of every piece."""
    segment, column = np.nonzero((changes > start[:, None]) & (changes < stop[:, None]))
    pieces = np.concatenate([
        np.stack([np.arange(len(start)), start], axis=1),
        np.stack([segment, changes[segment, column]], axis=1),
    ])  # fmt: skip
    pieces = np.unique(pieces, axis=0)
    segment, first = pieces[:, 0], pieces[:, 1]
    last = np.append(segment[1:] != segment[:-1], True)
    return segment, first, np.where(last, stop[segment], np.append(first[1:], 0))


def _disjoint(
    row: int, base: list[int], slope: list[int]
) -> tuple[tuple[int, int, int, int], ...]:
    """Intervals of an atom from its clipped bounds; what holds in its first row holds in all."""
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


class _Keys:
    """Which keys match attend bits: counts and runs, from the key segments."""

    def __init__(self, mask: AttentionMask) -> None:
        self._all = not mask.needs_bits
        self._identity = mask.key_table[:, IDENTITY]
        self._edges = np.append(mask.key_table[:, KEY_START], mask.n_keys)
        self._matches: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def count(self, ranges: Ranges, attend: int) -> tuple[int, int]:
        """How many keys of ``ranges`` match, and in how many runs about."""
        if self._all or not ranges:
            return _size(ranges), len(ranges)
        starts, stops, before = self._match(attend)
        keys = runs = 0
        for start, stop in ranges:
            first = bisect_right(stops, start)
            last = bisect_left(starts, stop)
            if first < last:
                keys += before[last] - before[first]
                keys -= max(start - starts[first], 0) + max(stops[last - 1] - stop, 0)
                runs += last - first
        return keys, runs

    def matching(self, ranges: Ranges, attend: int) -> Ranges:
        """The keys of ``ranges`` that match."""
        if self._all:
            return ranges
        starts, stops, _ = self._match(attend)
        return [
            (max(start, starts[i]), min(stop, stops[i]))
            for start, stop in ranges
            for i in range(bisect_right(stops, start), bisect_left(starts, stop))
        ]

    def _match(self, attend: int) -> tuple[list[int], list[int], list[int]]:
        """Runs of keys that match, and how many keys lie in earlier runs."""
        if attend not in self._matches:
            here = np.flatnonzero(np.diff((self._identity & attend) != 0, prepend=0, append=0))
            starts, stops = self._edges[here[::2]], self._edges[here[1::2]]
            before = np.concatenate([[0], np.cumsum(stops - starts)])
            self._matches[attend] = starts.tolist(), stops.tolist(), before.tolist()
        return self._matches[attend]


def _shared(atoms: list[_Atom], keys: _Keys, overhead: int) -> Iterator[list[_Atom]]:
    """Groups of atoms that share a block: those that see the same keys, and small ones where
    one call with a mask is cheaper than one each. Atoms of a group have the same attend bits;
    they may lie apart."""
    group: list[_Atom] = []
    cost, every, some = 0.0, [], []
    for atom in sorted(atoms, key=lambda atom: (atom.attend, atom.start)):
        joins = False
        if group and group[0].attend == atom.attend:
            rows = sum(member.rows for member in group) + atom.rows
            same = atom.still() and atom.intervals == group[0].intervals
            if same or (atom.rows < SMALL_ROWS and rows <= SHARED_ROWS):
                both_every = _intersect(every, atom.every())
                both_some = _union([*some, *atom.some()])
                both = _cost(rows, len(group) + 1, both_every, both_some, atom, keys, overhead)
                alone = _cost(atom.rows, 1, atom.every(), atom.some(), atom, keys, overhead)
                joins = both < cost + alone
        if joins:
            group.append(atom)
            cost, every, some = both, both_every, both_some
            continue
        if group:
            yield group
        group, every, some = [atom], atom.every(), atom.some()
        cost = _cost(atom.rows, 1, every, some, atom, keys, overhead)
    if group:
        yield group


def _cost(
    rows: int, row_runs: int, every: Ranges, some: Ranges, atom: _Atom, keys: _Keys,
    overhead: int,
) -> float:  # fmt: skip
    """Pairs of rows with attend bits like the atom's, overheads included: a full and a masked
    part, or one that masks everything."""
    full, full_runs = keys.count(every, atom.attend)
    seen, runs = keys.count(some, atom.attend)
    together = overhead + (rows + ROW_COST) * MASK_COST * seen + overhead * RUN_COST * runs
    apart = ((full > 0) + (seen > full)) * overhead + (rows + ROW_COST) * (
        full + MASK_COST * (seen - full)
    )
    apart += overhead * RUN_COST * (full_runs + (runs - full_runs + 1 if seen > full else 0))
    return min(together, apart) + overhead * RUN_COST * row_runs


def _blocks(group: list[_Atom], keys: _Keys, limits: Limits) -> Iterator[Block]:
    """The blocks of atoms that share one."""
    if len(group) > 1:
        runs = _union((atom.start, atom.stop) for atom in group)
        for page in _pages(runs, limits.rows):
            atoms = [
                atom.cut(max(atom.start, start), min(atom.stop, stop))
                for start, stop in page
                for atom in group
                if atom.start < stop and start < atom.stop
            ]
            yield from _block(page, _mixed(atoms, keys), limits)
        return
    atom = group[0]
    crossed = atom.crossed()
    for start, stop in _cut(range(atom.start, atom.stop), _rows(atom, crossed, keys, limits)):
        piece = atom.cut(start, stop)
        parts = _mixed([piece], keys) if crossed else _exact(piece, keys, limits.triangles)
        yield from _block([(start, stop)], parts, limits)


def _rows(atom: _Atom, crossed: bool, keys: _Keys, limits: Limits) -> int:
    """How many rows of an atom a block should have."""
    rows = atom.rows
    growing = any(t for _, _, _, t in atom.intervals)
    if crossed or any(s for _, _, s, _ in atom.intervals):
        # A window: many rows waste its corners, few rows are slow.
        width = _size(atom.every()) or 1
        width = max(width, min(b - a + (t - s) * atom.start for a, b, s, t in atom.intervals))
        rows = min(
            (128, 192, 256, 384, 512),
            key=lambda n: (1 + ROW_COST / n) * (width + n) + 3 * limits.overhead / n,
        )
    elif growing:
        # A triangle that needs a mask (keys among it that do not match), or is small.
        some = atom.some()
        holes = keys.count(some, atom.attend)[0] < _size(some)
        if holes or not limits.triangles or rows < CUT_TRIANGLE:
            rows = TRIANGLE_ROWS
    return min(rows, limits.rows or rows)


def _exact(atom: _Atom, keys: _Keys, triangles: bool) -> dict[Kind, Ranges]:
    """The keys of rows of one atom by kind of part, from its corners."""
    full, causal, masked = [], [], []
    first, last = atom.start, atom.stop - 1
    for a, b, s, t in atom.intervals:
        lo, inner_lo, inner_hi, hi = a + s * first, a + s * last, b + t * first, b + t * last
        if inner_lo >= inner_hi:
            masked.append((lo, hi))
            continue
        masked.append((lo, inner_lo))
        triangle = (inner_hi - 1, hi)
        size = hi - inner_hi + 1
        if t and size > 1 and triangles and keys.count([triangle], atom.attend)[0] == size:
            full.append((inner_lo, inner_hi - 1))
            causal.append(triangle)
        else:
            full.append((inner_lo, inner_hi))
            masked.append((inner_hi, hi))
    return {
        Kind.FULL: keys.matching(_union(full), atom.attend),
        Kind.CAUSAL: causal,
        Kind.MASKED: keys.matching(_union(masked), atom.attend),
    }


def _mixed(atoms: list[_Atom], keys: _Keys) -> dict[Kind, Ranges]:
    """The keys of rows of the same attend bits: what all see, and what else some see."""
    attend, every = atoms[0].attend, atoms[0].every()
    for atom in atoms[1:]:
        every = _intersect(every, atom.every())
    some = _union(r for atom in atoms for r in atom.some())
    return {
        Kind.FULL: keys.matching(every, attend),
        Kind.CAUSAL: [],
        Kind.MASKED: keys.matching(_subtract(some, every), attend),
    }


def _block(rows: Ranges, keys: dict[Kind, Ranges], limits: Limits) -> Iterator[Block]:
    """The block of rows with these keys; none if there are none."""
    runs, causal = len(keys[Kind.FULL]) + len(keys[Kind.MASKED]), len(keys[Kind.CAUSAL])
    calls = bool(keys[Kind.FULL]) + causal + bool(keys[Kind.MASKED])
    if calls > 1:
        # One call that masks everything, where that is cheaper than several and a merge.
        joined = _union(run for ranges in keys.values() for run in ranges)
        unmasked = _size(keys[Kind.FULL]) + _size(keys[Kind.CAUSAL])
        saved = calls - 1 + RUN_COST * (runs + causal - len(joined))
        if (_size(rows) + ROW_COST) * unmasked * (MASK_COST - 1) < saved * limits.overhead:
            keys = {Kind.FULL: [], Kind.CAUSAL: [], Kind.MASKED: joined}
    parts = [Part(Kind.CAUSAL, (run,)) for run in keys[Kind.CAUSAL]]
    for kind in (Kind.FULL, Kind.MASKED):
        parts += [Part(kind, tuple(page)) for page in _pages(keys[kind], limits.keys)]
    if parts:
        yield Block(tuple(rows), tuple(parts))


def _pages(ranges: Ranges, size: int) -> Iterator[Ranges]:
    """Ranges in portions of at most ``size`` together; 0 for one portion."""
    page, left = [], size
    for start, stop in ranges:
        while size and stop - start >= left:
            yield [*page, (start, start + left)]
            start, page, left = start + left, [], size
        if start < stop:
            page.append((start, stop))
            left -= stop - start
    if page:
        yield page


def _cut(rows: range, most: int) -> Iterator[tuple[int, int]]:
    """Even pieces of at most ``most`` rows."""
    pieces = -(-len(rows) // most)
    edges = [rows.start + len(rows) * i // pieces for i in range(pieces + 1)]
    return zip(edges[:-1], edges[1:], strict=True)


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Disjoint ascending ranges that cover the same keys."""
    found: Ranges = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def _intersect(first: Ranges, second: Ranges) -> Ranges:
    return _union((max(a, c), min(b, d)) for a, b in first for c, d in second)


def _subtract(ranges: Ranges, taken: Sequence[tuple[int, int]]) -> Ranges:
    """What of disjoint ascending ``ranges`` is in none of ``taken``, which are so too."""
    found, i = [], 0
    for start, stop in ranges:
        while i < len(taken) and taken[i][1] <= start:
            i += 1
        j = i
        while j < len(taken) and taken[j][0] < stop:
            if start < taken[j][0]:
                found.append((start, taken[j][0]))
            start = max(start, taken[j][1])
            j += 1
        if start < stop:
            found.append((start, stop))
    return found
