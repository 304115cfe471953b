"""Attention work per block of queries: the number of its active key blocks, computed from the
segment table of a mask instead of its tokens.

A key block is active for a query block if at least one (query, key) pair of the tile is visible; a
kernel computes exactly the active tiles (Cornstarch v2 §3.2.1). Rows are processed in pieces, each
within one query block and one segment, where every bound is affine with slope 0 or 1. The rows of a
piece together see one contiguous range of keys per interval:

- slopes (lo, hi) = (0, 0), (0, 1) and (1, 0): the ranges of the rows are nested; the largest range
  has lo of the first row and hi of the last row;
- (1, 1): all ranges have the same width and move by one, so there are no gaps. A width of 0 or less
  is empty, which the first lo and the last hi alone would not show.

Clipping to the existing keys clips the union as well. Blocks inside such a range are looked up in
prefix counts per attend value; the at most two blocks that are partly covered are tested exactly.
If ranges with different attend values overlap, a block counts if it has a key that matches the OR
of their attend values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from raymm.errors import PlanError

DEFAULT_BLOCK = 128
"""Default tokens per block of kernels and distributions."""

# Number of attend values with prefix counts; blocks of further values are tested one by one. This
# bounds memory to 64 x 32 KB for a million keys.
MAX_PREFIXES = 64
# Shorter runs of blocks are tested one by one, which is as fast and needs no prefix counts.
SHORT_RUN = 8
QUERY_COLUMNS, KEY_COLUMNS = 10, 2


def active_key_blocks(
    query_table: np.ndarray,
    key_table: np.ndarray,
    n_queries: int,
    n_keys: int,
    *,
    query_block: int = DEFAULT_BLOCK,
    key_block: int = DEFAULT_BLOCK,
) -> np.ndarray:
    """Return the (ceil(n_queries / query_block),) int64 exact number of active key blocks of every
    query block.

    The arguments are the attributes of the same names of ``raymm.kernels.mask.mask.AttentionMask``.

    Args:
        query_table: (S, 10) int64, one row per segment of query rows: first row, attend bits, bases
            of lo1, hi1, lo2, hi2, and their slopes (0 or 1). A bound is ``base + slope * row``,
            clipped to [0, n_keys].
        key_table: (Sk, 2) int64, one row per segment of keys: first key, identity bits.
        query_block: rows per query block; the last block may be shorter.
        key_block: keys per key block; the last block may be shorter.

    Raises:
        PlanError: sizes below 0, blocks below 1, tables of the wrong shape, segments that do not
            start at 0 or do not ascend, or slopes other than 0 and 1.
    """
    for name, value, least in (
        ("n_queries", n_queries, 0), ("n_keys", n_keys, 0),
        ("query_block", query_block, 1), ("key_block", key_block, 1),
    ):
        if value < least:
            raise PlanError(f"{name} must be at least {least}, got {value}")
    query = _table("query_table", query_table, QUERY_COLUMNS, n_queries)
    key = _table("key_table", key_table, KEY_COLUMNS, n_keys)
    slopes = query[:, 6:]
    if ((slopes | 1) != 1).any():
        raise PlanError(
            f"query_table: slopes must be 0 or 1, got {np.unique(slopes).tolist()}"
        )
    return _count(query, key, int(n_queries), int(n_keys), int(query_block), int(key_block))


def _table(name: str, table: np.ndarray, columns: int, size: int) -> np.ndarray:
    table = np.ascontiguousarray(table, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != columns:
        raise PlanError(f"{name} must be (segments, {columns}), got {table.shape}")
    starts = table[:, 0]
    if (len(starts) == 0) != (size == 0) and size:
        raise PlanError(f"{name} has no segment for {size} positions")
    if len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > size):
        raise PlanError(
            f"{name}: segments must start at 0, ascend and end by {size}, "
            f"got starts from {starts.min()} to {starts.max()}"
        )
    return table


@njit(cache=True)
def _key_blocks(key, n_keys, key_block):
    """Return, per key block, the OR of its keys' identities and the segment of its first key."""
    count = (n_keys + key_block - 1) // key_block
    kinds = np.zeros(count, np.int64)
    first = np.zeros(count, np.int64)
    for s in range(key.shape[0]):
        start = key[s, 0]
        stop = key[s + 1, 0] if s + 1 < key.shape[0] else n_keys
        if start >= stop:
            continue
        for block in range(start // key_block, (stop - 1) // key_block + 1):
            kinds[block] |= key[s, 1]
            if block * key_block >= start:
                first[block] = s
    return kinds, first


@njit(cache=True)
def _ceil_log2(number):
    bits = 0
    while (1 << bits) < number:
        bits += 1
    return bits


@njit(cache=True, inline="always")
def _has_key(key, s, n_keys, lo, hi, attend):
    """Return True if [lo, hi) has a key that matches attend; segment s begins at or before lo."""
    while s < key.shape[0] and key[s, 0] < hi:
        stop = key[s + 1, 0] if s + 1 < key.shape[0] else n_keys
        if stop > lo and stop > key[s, 0] and key[s, 1] & attend:
            return True
        s += 1
    return False


@njit(cache=True, inline="always")
def _matching(kinds, values, prefixes, used, start, stop, attend):
    """Return the number of blocks of [start, stop) with a key that matches attend."""
    if stop - start > SHORT_RUN:
        slot = 0
        while slot < used[0] and values[slot] != attend:
            slot += 1
        if slot == used[0] and slot < MAX_PREFIXES:
            total = 0
            prefixes[slot, 0] = 0
            for block in range(kinds.shape[0]):
                total += (kinds[block] & attend) != 0
                prefixes[slot, block + 1] = total
            values[slot] = attend
            used[0] += 1
        if slot < MAX_PREFIXES:
            return np.int64(prefixes[slot, stop]) - np.int64(prefixes[slot, start])
    total = 0
    for block in range(start, stop):
        total += (kinds[block] & attend) != 0
    return total


@njit(cache=True, inline="always")
def _gather(query, n_keys, s, row, stop, ranges):
    """Write the (attend, lo, hi) ranges that rows [row, stop) see to ``ranges``, joined where they
    touch; return their number, and the segment of row ``stop``. Segment s holds the first row."""
    count = 0
    while row < stop:
        segment_stop = query[s + 1, 0] if s + 1 < query.shape[0] else stop
        last = min(stop, segment_stop) - 1
        attend = query[s, 1]
        if last >= row and attend != 0:
            for i in (2, 4):
                lo = query[s, i] + query[s, i + 4] * row
                hi = query[s, i + 1] + query[s, i + 5] * last
                if query[s, i + 4] & query[s, i + 5] and query[s, i] >= query[s, i + 1]:
                    continue
                lo, hi = max(lo, 0), min(hi, n_keys)
                if lo >= hi:
                    continue
                r = 0
                while r < count and not (
                    ranges[r, 0] == attend and lo <= ranges[r, 2] and ranges[r, 1] <= hi
                ):
                    r += 1
                if r == count:
                    ranges[r, 0], ranges[r, 1], ranges[r, 2] = attend, lo, hi
                    count += 1
                else:
                    ranges[r, 1] = min(ranges[r, 1], lo)
                    ranges[r, 2] = max(ranges[r, 2], hi)
        row = max(row, last + 1)
        if segment_stop <= stop and s + 1 < query.shape[0]:
            s += 1
    return count, s


@njit(cache=True, inline="always")
def _runs(key, first, n_keys, key_block, shift, attend, lo, hi):
    """Return the key blocks of a range: (start, stop) of completely covered blocks, and the partly
    covered blocks to the left and right if they have a visible key in the range, else -1."""
    if shift >= 0:
        left, right = lo >> shift, (hi - 1) >> shift
    else:
        left, right = lo // key_block, (hi - 1) // key_block
    start = left if lo == left * key_block else left + 1
    stop = right + 1 if hi == min((right + 1) * key_block, n_keys) else right
    left_cut, right_cut = -1, -1
    if left == right:
        if stop <= start and _has_key(key, first[left], n_keys, lo, hi, attend):
            left_cut = left
        return start, max(start, stop), left_cut, right_cut
    if start > left and _has_key(key, first[left], n_keys, lo, start * key_block, attend):
        left_cut = left
    if stop <= right and _has_key(key, first[right], n_keys, stop * key_block, hi, attend):
        right_cut = right
    return start, stop, left_cut, right_cut


@njit(cache=True, inline="always")
def _sort(events, count):
    """Sort ascending, in place. Insertion sort is fastest for the few events of most query
    blocks."""
    if count > 64:
        events[:count].sort()
        return
    for i in range(1, count):
        value, j = events[i], i
        while j and events[j - 1] > value:
            events[j] = events[j - 1]
            j -= 1
        events[j] = value


@njit(cache=True)
def _count(query, key, n_queries, n_keys, query_block, key_block):
    kinds, first = _key_blocks(key, n_keys, key_block)
    # Shifts replace divisions, which would take most of the time of this function.
    shift = _ceil_log2(key_block) if key_block & (key_block - 1) == 0 else -1
    values = np.empty(MAX_PREFIXES, np.int64)
    prefixes = np.empty((MAX_PREFIXES, kinds.shape[0] + 1), np.int32)
    used = np.zeros(1, np.int64)
    most = 2 * min(query_block, query.shape[0])
    ranges = np.empty((most, 3), np.int64)
    # Starts and ends of runs of blocks. An event holds the block; its low bits hold twice the
    # number of an attend value, plus 1 for a start. Number 0 matches all bits: known to be active.
    events = np.empty(6 * most, np.int64)
    distinct, open_runs = np.empty(most + 1, np.int64), np.zeros(most + 1, np.int64)
    distinct[0] = -1
    bits = _ceil_log2(2 * (most + 1))
    out = np.empty((n_queries + query_block - 1) // query_block, np.int64)
    s = 0
    for index in range(out.shape[0]):
        row = index * query_block
        count, s = _gather(query, n_keys, s, row, min(row + query_block, n_queries), ranges)
        separate = count <= 1
        if count == 2:
            gaps = ranges[0, 1] - ranges[1, 2], ranges[1, 1] - ranges[0, 2]
            separate = max(gaps) >= key_block
        total = 0
        if separate:  # no key block has two ranges, so none is counted twice
            for r in range(count):
                attend = ranges[r, 0]
                start, stop, left, right = _runs(
                    key, first, n_keys, key_block, shift, attend, ranges[r, 1], ranges[r, 2]
                )
                total += (left >= 0) + (right >= 0) + _matching(
                    kinds, values, prefixes, used, start, stop, attend
                )
            out[index] = total
            continue
        numbers, ends = 1, 0
        for r in range(count):
            attend = ranges[r, 0]
            a = 1
            while a < numbers and distinct[a] != attend:
                a += 1
            if a == numbers:
                distinct[a] = attend
                numbers += 1
            start, stop, left, right = _runs(
                key, first, n_keys, key_block, shift, attend, ranges[r, 1], ranges[r, 2]
            )
            if start < stop:
                events[ends] = start << bits | 2 * a + 1
                events[ends + 1] = stop << bits | 2 * a
                ends += 2
            for block in (left, right):
                if block >= 0:
                    events[ends] = block << bits | 1
                    events[ends + 1] = (block + 1) << bits
                    ends += 2
        _sort(events, ends)
        position, seen = np.int64(0), np.int64(0)
        for e in range(ends):
            block, run = events[e] >> bits, events[e] & ((1 << bits) - 1)
            if block > position:
                if seen:
                    total += _matching(kinds, values, prefixes, used, position, block, seen)
                position = block
            open_runs[run >> 1] += 1 if run & 1 else -1
            seen = np.int64(0)
            for a in range(numbers):
                if open_runs[a]:
                    seen |= distinct[a]
        out[index] = total
    return out
