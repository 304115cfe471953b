"""The attention mask: a short table of segments that all attention kernels read.

A query row ``q`` sees a key ``k`` when

    (lo1(q) <= k < hi1(q)  or  lo2(q) <= k < hi2(q))  and  attend(q) & identity(k) != 0

Within a segment of rows, the four bounds are affine in ``q`` with slope 0 or 1, so the size of a
mask depends on its number of segments, not of tokens. ``attend`` holds the kinds of tokens that a
query may see, ``identity`` the kind of a key (63 bits). Cornstarch v2 §4.2 has both in one field,
which cannot express "this image only" or "this document only"; intervals can.

A sliding window narrows the first interval (a row's past) and leaves the second unchanged (its own
image, attention sinks, a shared question).

Legend: ``Tq`` query rows, ``Tk`` keys, ``S`` query segments, ``Sk`` key segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from raymm.errors import ModelError
from raymm.kernels.mask.columns import (
    ATTEND,
    BASES,
    IDENTITY,
    KEY_COLUMNS,
    KEY_START,
    QUERY_COLUMNS,
    SLOPES,
    START,
)
from raymm.kernels.mask.picture import draw_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL_KINDS = (1 << 63) - 1
"""Attend bits of a query that may look at every kind of token."""


@dataclass(frozen=True)
class RowArrays:
    """A mask's table expanded to one entry per token, as kernels read it.

    Attributes:
        bounds: (4, Tq) int32: lo1, hi1, lo2, hi2 of every row, within [0, Tk].
        attend: (Tq,) int64.
        identity: (Tk,) int64.
    """

    bounds: torch.Tensor
    attend: torch.Tensor
    identity: torch.Tensor


class AttentionMask:
    """Visible keys of every query of a sequence. Immutable, and hashable by identity.

    Tables are copied and checked, and equal neighbours are merged, so equal masks that are built
    the same way have equal tables.

    Args:
        query_table: (S, 10) int64, one row per segment of query rows: first row, attend bits, bases
            of lo1, hi1, lo2, hi2, and their slopes (0 or 1).
        key_table: (Sk, 2) int64, one row per segment of keys: first key, identity bits.
        n_queries: Tq.
        n_keys: Tk.

    Raises:
        ModelError: segments out of order, slopes other than 0 and 1, or negative bits.
    """

    def __init__(
        self, query_table: np.ndarray, key_table: np.ndarray, n_queries: int, n_keys: int
    ) -> None:
        query = np.array(query_table, dtype=np.int64).reshape(-1, QUERY_COLUMNS)
        key = np.array(key_table, dtype=np.int64).reshape(-1, KEY_COLUMNS)
        _check_starts("query", query[:, START], n_queries)
        _check_starts("key", key[:, KEY_START], n_keys)
        slopes = query[:, SLOPES]
        if ((slopes != 0) & (slopes != 1)).any():
            raise ModelError(f"slopes must be 0 or 1, got {sorted(set(slopes.ravel().tolist()))}")
        if (query[:, ATTEND] < 0).any() or (key[:, IDENTITY] < 0).any():
            raise ModelError("attend and identity have 63 bits: they must not be negative")
        self.query_table = _join_equal(query, n_queries)
        self.key_table = _join_equal(key, n_keys)
        self.n_queries, self.n_keys = int(n_queries), int(n_keys)
        self.query_table.flags.writeable = self.key_table.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"AttentionMask({self.n_queries} queries in {len(self.query_table)} segments x "
            f"{self.n_keys} keys in {len(self.key_table)})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(Tq, Tk)."""
        return self.n_queries, self.n_keys

    @property
    def query_stops(self) -> np.ndarray:
        """Index after the last row of every segment, (S,) int64."""
        return np.append(self.query_table[1:, START], self.n_queries)

    @property
    def key_stops(self) -> np.ndarray:
        """Index after the last key of every segment, (Sk,) int64."""
        return np.append(self.key_table[1:, KEY_START], self.n_keys)

    @cached_property
    def needs_bits(self) -> bool:
        """False if attend and identity never hide a key within an interval."""
        identities, attends = self.key_table[:, IDENTITY], self.query_table[:, ATTEND]
        return bool(((np.unique(attends)[:, None] & np.unique(identities)[None]) == 0).any())

    def bounds(self) -> np.ndarray:
        """Return lo1, hi1, lo2, hi2 of every row, clipped to [0, Tk], as (4, Tq) int64."""
        lengths = self.query_stops - self.query_table[:, START]
        rows = np.arange(self.n_queries)
        bases = np.repeat(self.query_table[:, BASES], lengths, axis=0)
        slopes = np.repeat(self.query_table[:, SLOPES], lengths, axis=0)
        return np.clip(bases + slopes * rows[:, None], 0, self.n_keys).T

    def rows(self, device: torch.device | str = "cpu") -> RowArrays:
        """Return the table expanded to one entry per token, on ``device``; O(Tq + Tk) bytes."""
        attend = np.repeat(
            self.query_table[:, ATTEND], self.query_stops - self.query_table[:, START]
        )
        identity = np.repeat(
            self.key_table[:, IDENTITY], self.key_stops - self.key_table[:, KEY_START]
        )
        return RowArrays(
            torch.from_numpy(np.ascontiguousarray(self.bounds(), dtype=np.int32)).to(device),
            torch.from_numpy(attend).to(device),
            torch.from_numpy(identity).to(device),
        )

    def dense(self, queries: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
        """Return (Tq, Tk) bool, or the part that the slices select: True where visible."""
        arrays = self.rows()
        lo1, hi1, lo2, hi2 = (bound[queries, None] for bound in arrays.bounds)
        key = torch.arange(self.n_keys)[None, keys]
        in_interval = ((lo1 <= key) & (key < hi1)) | ((lo2 <= key) & (key < hi2))
        return in_interval & ((arrays.attend[queries, None] & arrays.identity[None, keys]) != 0)

    def windowed(self, window: int) -> AttentionMask:
        """Return the mask with the first interval of every row narrowed to ``k > q - window``.

        Rows and keys must use the same positions (self-attention).

        Raises:
            ModelError: ``window`` is below 1.
        """
        if window < 1:
            raise ModelError(f"window must be at least 1 (a token sees itself), got {window}")
        base = 1 - window
        table, stops = self.query_table, self.query_stops
        # lo1 becomes max(lo1, q + base). A constant lo1 switches at q = lo1 - base.
        crossing = np.where(table[:, SLOPES][:, 0] == 0, table[:, 2] - base, table[:, START])
        table, starts = _split(table, stops, [crossing])
        lo = table[:, 2] + table[:, 6] * starts
        narrower = starts + base >= lo
        table[narrower, 2], table[narrower, 6] = base, 1
        return AttentionMask(table, self.key_table, self.n_queries, self.n_keys)

    def select_queries(self, ranges: Sequence[tuple[int, int]]) -> AttentionMask:
        """Return the mask of the rows of ``ranges`` [start, stop), concatenated; keys stay global.
        """
        tables, offset = [], 0
        for start, stop in _check_ranges("query", ranges, self.n_queries):
            segments = _cut(self.query_table, self.query_stops, start, stop)
            shift = start - offset  # old row = new row + shift
            segments[:, START] -= shift
            segments[:, BASES] += segments[:, SLOPES] * shift
            tables.append(segments)
            offset += stop - start
        table = np.concatenate(tables) if tables else np.zeros((0, QUERY_COLUMNS), dtype=np.int64)
        return AttentionMask(table, self.key_table, offset, self.n_keys)

    def select_keys(self, ranges: Sequence[tuple[int, int]]) -> AttentionMask:
        """Return the mask of the concatenated keys of ascending ``ranges`` [start, stop)."""
        ranges = _check_ranges("key", ranges, self.n_keys)
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        if (edges[1:, 0] < edges[:-1, 1]).any():
            raise ModelError(f"key ranges must ascend and not overlap, got {ranges}")
        # A moving bound changes its slope where it enters or leaves a range.
        table, bounds = self.query_table, np.unique(edges)
        crossings = [
            np.where(table[:, SLOPES][:, i] == 1, bound - table[:, BASES][:, i], table[:, START])
            for i in range(4)
            for bound in [*bounds.tolist(), 0, self.n_keys]
        ]
        table, starts = _split(table, self.query_stops, crossings)
        at_start = np.clip(table[:, BASES] + table[:, SLOPES] * starts[:, None], 0, self.n_keys)
        at_next = np.clip(
            table[:, BASES] + table[:, SLOPES] * (starts + 1)[:, None], 0, self.n_keys
        )
        lengths = edges[:, 1] - edges[:, 0]

        def rank(value: np.ndarray) -> np.ndarray:
            """Return the number of selected keys before a global key."""
            return np.clip(value[..., None] - edges[:, 0], 0, lengths).sum(axis=-1)

        table[:, SLOPES] = rank(at_next) - rank(at_start)
        table[:, BASES] = rank(at_start) - table[:, SLOPES] * starts[:, None]
        keys, offset = [], 0
        for start, stop in ranges:
            segments = _cut(self.key_table, self.key_stops, start, stop)
            segments[:, KEY_START] += offset - start
            keys.append(segments)
            offset += stop - start
        key_table = np.concatenate(keys) if keys else np.zeros((0, KEY_COLUMNS), dtype=np.int64)
        return AttentionMask(table, key_table, self.n_queries, offset)

    def seen_keys(self) -> np.ndarray:
        """Return True for keys that some row sees, (Tk,) bool; O(Tk) per distinct ``attend``."""
        table, last = self.query_table, self.query_stops - 1
        top, bottom = (
            table[:, BASES] + table[:, SLOPES] * row[:, None] for row in (table[:, START], last)
        )
        lengths = self.key_stops - self.key_table[:, KEY_START]
        seen = np.zeros(self.n_keys, dtype=bool)
        for attend in np.unique(table[:, ATTEND]):
            changes = np.zeros(self.n_keys + 1, dtype=np.int64)
            for first in (0, 2):
                # Bounds move by 0 or 1 per row, so the keys that a segment sees are contiguous.
                # There are some if the interval of the first or the last row is not empty.
                lo, hi = top[:, first], bottom[:, first + 1]
                selected = (lo < top[:, first + 1]) | (bottom[:, first] < hi)
                selected &= table[:, ATTEND] == attend
                np.add.at(changes, lo[selected].clip(0, self.n_keys), 1)
                np.add.at(changes, hi[selected].clip(0, self.n_keys), -1)
            kinds = np.repeat((self.key_table[:, IDENTITY] & attend) != 0, lengths)
            seen |= (np.cumsum(changes[:-1]) > 0) & kinds
        return seen

    def area(self) -> int:
        """Return the number of visible (query, key) pairs, without a dense mask."""
        lo1, hi1, lo2, hi2 = self.bounds()
        identities = np.unique(self.key_table[:, IDENTITY])
        attend = np.repeat(
            self.query_table[:, ATTEND], self.query_stops - self.query_table[:, START]
        )
        lengths = self.key_stops - self.key_table[:, KEY_START]
        total = 0
        for identity in identities:
            matching = np.repeat(self.key_table[:, IDENTITY] == identity, lengths)
            before = np.concatenate([[0], np.cumsum(matching)])

            def count(lo: np.ndarray, hi: np.ndarray, before: np.ndarray = before) -> np.ndarray:
                return before[np.maximum(hi, lo)] - before[lo]

            overlap = count(np.maximum(lo1, lo2), np.minimum(hi1, hi2))
            seen = count(lo1, hi1) + count(lo2, hi2) - overlap
            total += int(seen[(attend & identity) != 0].sum())
        return total

    def draw(self, width: int = 512) -> Figure:
        """Draw the mask, ``width`` pixels a side, readable at any length: darkness is the visible
        share of a pixel's pairs. Save with ``.savefig(path)``."""
        return draw_mask(self, width)


def as_masks(
    mask: AttentionMask | Sequence[AttentionMask], batch: int, n_queries: int, n_keys: int
) -> tuple[AttentionMask, ...]:
    """Return one mask per sequence of a batch; a single mask is repeated.

    Raises:
        ModelError: the number of masks is neither 1 nor ``batch``, or a mask has another shape.
    """
    masks = (mask,) if isinstance(mask, AttentionMask) else tuple(mask)
    if len(masks) == 1:
        masks *= batch
    if len(masks) != batch:
        raise ModelError(f"got {len(masks)} masks for a batch of {batch}; give one, or {batch}")
    for index, entry in enumerate(masks):
        if entry.shape != (n_queries, n_keys):
            raise ModelError(
                f"mask {index} of the batch is for {entry.n_queries} queries and {entry.n_keys} "
                f"keys, the tensors have {n_queries} and {n_keys}"
            )
    return masks


def query_rows(
    starts: Iterable[int],
    *,
    lo: Iterable[int] | int = 0,
    hi: Iterable[int] | int = 0,
    lo_slope: Iterable[int] | int = 0,
    hi_slope: Iterable[int] | int = 0,
    lo2: Iterable[int] | int = 0,
    hi2: Iterable[int] | int = 0,
    lo2_slope: Iterable[int] | int = 0,
    hi2_slope: Iterable[int] | int = 0,
    attend: Iterable[int] | int = ALL_KINDS,
) -> np.ndarray:
    """Return a query table (S, 10) from its columns; a number stands for a constant column.

    Args:
        starts: (S,) first row of every segment.
        lo, hi: (S,) or one for all: first key of the first interval, and index after its last.
        lo_slope, hi_slope: 1 where the bound moves with the row, else 0.
        attend: bits of the kinds of keys that a row sees.
    """
    starts = np.fromiter(starts, dtype=np.int64)
    columns = (starts, attend, lo, hi, lo2, hi2, lo_slope, hi_slope, lo2_slope, hi2_slope)
    return np.stack(
        [np.broadcast_to(np.asarray(c, dtype=np.int64), starts.shape) for c in columns], axis=1
    )


def _check_starts(what: str, starts: np.ndarray, size: int) -> None:
    if size < 0:
        raise ModelError(f"the number of {what} positions must not be negative, got {size}")
    if not len(starts) and size:
        raise ModelError(f"{size} {what} positions need at least one {what} segment")
    if len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > size):
        raise ModelError(
            f"{what} segments must start at 0, ascend and end by {size}, got {starts.tolist()}"
        )


def _check_ranges(
    what: str, ranges: Sequence[tuple[int, int]], size: int
) -> list[tuple[int, int]]:
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise ModelError(f"{what} range [{start}, {stop}) is not within [0, {size})")
    return [(int(start), int(stop)) for start, stop in ranges]


def _join_equal(table: np.ndarray, size: int) -> np.ndarray:
    """Drop empty segments and those equal to the segment before."""
    table = table[np.diff(np.append(table[:, 0], size)) > 0]
    different = (table[1:, 1:] != table[:-1, 1:]).any(axis=1)
    return table[np.append(np.ones(min(len(table), 1), dtype=bool), different)]


def _cut(table: np.ndarray, stops: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return a copy of the segments that overlap [start, stop), clipped at ``start``."""
    segments = table[(stops > start) & (table[:, 0] < stop)].copy()
    segments[:, 0] = np.maximum(segments[:, 0], start)
    return segments


def _split(
    table: np.ndarray, stops: np.ndarray, crossings: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Split every segment at those of its ``crossings`` (each (S,)) that lie inside it. Return a
    new table and its starts."""
    rows, starts = [np.arange(len(table))], [table[:, 0]]
    for crossing in crossings:
        in_segment = (crossing > table[:, 0]) & (crossing < stops)
        rows.append(np.flatnonzero(in_segment))
        starts.append(crossing[in_segment])
    start, row = np.concatenate(starts), np.concatenate(rows)
    order = np.lexsort((start, row))
    longer = table[row[order]].copy()
    longer[:, 0] = start[order]
    return longer, longer[:, 0].copy()
