"""Tiles of the score matrix that a mask needs, as runs of blocks.

A tile is (a block of query rows) x (a block of keys). Runs replace dense tile maps, which would
take hundreds of megabytes for a million tokens. A run is *full* if every pair in its tiles is
visible, so a kernel can skip the mask test; other runs are *partial*. Runs are computed on the host
from the segment table, in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raymm.kernels.mask.columns import BASES, SLOPES
from raymm.kernels.mask.compiled import compiled
from raymm.kernels.mask.mask import AttentionMask

_NONE, _PARTIAL, _FULL = 0, 1, 2


@dataclass(frozen=True)
class Tiles:
    """Runs of active blocks of one side, for each block of the other.

    Attributes:
        block_q, block_k: rows and keys of a tile.
        offsets: (n + 1,) int64: block ``i`` has runs ``offsets[i]`` to ``offsets[i + 1]``.
        runs: (R, 3) int32: first block, index after the last, 1 if full else 0; ascending.
    """

    block_q: int
    block_k: int
    offsets: np.ndarray
    runs: np.ndarray

    @property
    def work(self) -> np.ndarray:
        """Active tiles per block, (n,) int64."""
        lengths = (self.runs[:, 1] - self.runs[:, 0]).astype(np.int64)
        cumulative = np.concatenate([[0], np.cumsum(lengths)])
        return cumulative[self.offsets[1:]] - cumulative[self.offsets[:-1]]


def key_runs(mask: AttentionMask, block_q: int, block_k: int) -> Tiles:
    """Return runs of active blocks of ``block_k`` keys, for each block of ``block_q`` query rows.

    A tile with a visible pair is in exactly one run, a tile without is in none.

    Raises:
        ValueError: a block size is below 1.
    """
    offsets, runs = _scan(mask, block_q, block_k, False)
    return Tiles(block_q, block_k, offsets, runs)


def query_runs(mask: AttentionMask, block_q: int, block_k: int) -> Tiles:
    """Return the same tiles transposed: runs of blocks of query rows, for each block of keys."""
    offsets, runs = _scan(mask, block_q, block_k, True)
    return Tiles(block_q, block_k, offsets, runs)


class _Rows(NamedTuple):
    """Segments of query rows, and their block size.

    Attributes:
        starts, stops: (S,).
        bases, slopes: (S, 4) of the bounds.
        kinds: (S,) index into ``_Keys.attends``.
    """

    count: int
    block: int
    starts: np.ndarray
    stops: np.ndarray
    bases: np.ndarray
    slopes: np.ndarray
    kinds: np.ndarray


class _Keys(NamedTuple):
    """Segments of keys, and their block size.

    Attributes:
        starts, stops, identity: (S,).
        attends: (A,) distinct attend bits of rows.
        states: (A, blocks) uint8: none, some or all keys of a block match.
    """

    count: int
    block: int
    starts: np.ndarray
    stops: np.ndarray
    identity: np.ndarray
    attends: np.ndarray
    states: np.ndarray


def _scan(
    mask: AttentionMask, block_q: int, block_k: int, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    if block_q < 1 or block_k < 1:
        raise ValueError(f"blocks must be at least 1, got block_q {block_q}, block_k {block_k}")
    attends, kinds = np.unique(mask.query_table[:, 1], return_inverse=True)
    rows = _Rows(
        mask.n_queries,
        block_q,
        mask.query_table[:, 0],
        mask.query_stops,
        np.ascontiguousarray(mask.query_table[:, BASES]),
        np.ascontiguousarray(mask.query_table[:, SLOPES]),
        kinds.astype(np.int64),
    )
    keys = _Keys(
        mask.n_keys,
        block_k,
        mask.key_table[:, 0],
        mask.key_stops,
        mask.key_table[:, 1],
        attends,
        _key_states(attends, mask.key_table, mask.key_stops, mask.n_keys, block_k),
    )
    return _runs(rows, keys, transposed)


@compiled
def _key_states(attends, key_table, key_stops, n_keys, block_k):
    """Return (kinds of query, key blocks) uint8: none, some or all keys of a block match."""
    n_blocks = -(-n_keys // block_k)
    matching = np.zeros((len(attends), n_blocks), dtype=np.int64)
    for a in range(len(attends)):
        for s in range(len(key_table)):
            if attends[a] & key_table[s, 1]:
                lo, hi = key_table[s, 0], key_stops[s]
                for b in range(lo // block_k, -(-hi // block_k)):
                    matching[a, b] += min(hi, (b + 1) * block_k) - max(lo, b * block_k)
    states = np.empty((len(attends), n_blocks), dtype=np.uint8)
    for b in range(n_blocks):
        size = min(n_keys, (b + 1) * block_k) - b * block_k
        for a in range(len(attends)):
            count = matching[a, b]
            states[a, b] = _NONE if count == 0 else (_FULL if count == size else _PARTIAL)
    return states


@compiled
def _any_match(keys, attend, lo, hi):
    """Return True if a key of [lo, hi) has an identity that shares a bit with ``attend``."""
    s = np.searchsorted(keys.starts, lo, side="right") - 1
    while s < len(keys.starts) and keys.starts[s] < hi:
        if keys.identity[s] & attend and keys.stops[s] > lo:
            return True
        s += 1
    return False


@compiled
def _bound(rows, segment, which, q):
    return rows.bases[segment, which] + rows.slopes[segment, which] * q


@compiled
def _mark_seen(rows, keys, segment, q0, q1, seen):
    """Set ``seen`` for blocks with a key that some row of [q0, q1) in a segment sees.

    Bounds move by 0 or 1 per row, so the keys that rows see through one interval are contiguous,
    from the first row's lower to the last row's upper bound. There are such keys if the interval of
    the first or the last row is not empty.
    """
    kind = rows.kinds[segment]
    attend, states = keys.attends[kind], keys.states[kind]
    for i in (0, 2):
        lo0, hi0 = _bound(rows, segment, i, q0), _bound(rows, segment, i + 1, q0)
        lo1, hi1 = _bound(rows, segment, i, q1 - 1), _bound(rows, segment, i + 1, q1 - 1)
        if lo0 >= hi0 and lo1 >= hi1:
            continue
        lo0, hi1 = max(lo0, 0), min(hi1, keys.count)
        if lo0 >= hi1:
            continue
        for b in range(lo0 // keys.block, -(-hi1 // keys.block)):
            if seen[b] or states[b] == _NONE:
                continue
            start, stop = b * keys.block, min((b + 1) * keys.block, keys.count)
            inner = lo0 <= start and stop <= hi1
            if inner or states[b] == _FULL:
                seen[b] = True
            else:
                seen[b] = _any_match(keys, attend, max(start, lo0), min(stop, hi1))


@compiled
def _count_whole(rows, keys, segment, q0, q1, whole):
    """Add 1 to ``whole`` for blocks that every row of [q0, q1) in a segment sees completely: those
    between the last row's lower and the first row's upper bound."""
    states = keys.states[rows.kinds[segment]]
    n_keys, last = keys.count, q1 - 1
    # Two ranges, merged if they overlap or touch.
    a0, a1 = max(_bound(rows, segment, 0, last), 0), min(_bound(rows, segment, 1, q0), n_keys)
    b0, b1 = max(_bound(rows, segment, 2, last), 0), min(_bound(rows, segment, 3, q0), n_keys)
    if a0 < a1 and b0 < b1 and a0 <= b1 and b0 <= a1:
        a0, a1 = min(a0, b0), max(a1, b1)
        b0 = b1 = 0
    for lo, hi in ((a0, a1), (b0, b1)):
        for b in range(-(-lo // keys.block), -(-hi // keys.block)):
            if min((b + 1) * keys.block, n_keys) <= hi and states[b] == _FULL:
                whole[b] += 1


@compiled
def _runs(rows, keys, transposed):
    """Scan blocks of query rows in order. Return runs per query block, or (transposed) per key
    block; a first pass counts them and a second writes them."""
    n_q, n_k = -(-rows.count // rows.block), -(-keys.count // keys.block)
    n = n_k if transposed else n_q
    counts = np.zeros(n + 1, dtype=np.int64)
    runs = np.empty((0, 3), dtype=np.int32)
    seen = np.zeros(n_k, dtype=np.bool_)
    full_segments = np.zeros(n_k, dtype=np.int64)  # segments whose rows see the whole block
    previous_state = np.zeros(n_k, dtype=np.uint8)  # state in the previous query block (transposed)
    for writing in (False, True):
        if writing:
            for i in range(n):
                counts[i + 1] += counts[i]
            runs = np.empty((counts[n], 3), dtype=np.int32)
        next_run = counts.copy()  # index of the next run of each block
        previous_state[:] = _NONE
        first = 0
        for i in range(n_q):
            q0, q1 = i * rows.block, min((i + 1) * rows.block, rows.count)
            seen[:] = False
            full_segments[:] = 0
            while rows.stops[first] <= q0:
                first += 1
            segment = first
            while segment < len(rows.starts) and rows.starts[segment] < q1:
                lo, hi = max(q0, rows.starts[segment]), min(q1, rows.stops[segment])
                _mark_seen(rows, keys, segment, lo, hi, seen)
                _count_whole(rows, keys, segment, lo, hi, full_segments)
                segment += 1
            last = _NONE
            for b in range(n_k):
                state = _NONE
                if seen[b]:
                    state = _FULL if full_segments[b] == segment - first else _PARTIAL
                last_state = previous_state[b] if transposed else last
                owner, position = (b, i) if transposed else (i, b)
                if state != _NONE:
                    if state != last_state:
                        if writing:
                            runs[next_run[owner], 0] = position
                            runs[next_run[owner], 2] = 1 if state == _FULL else 0
                            next_run[owner] += 1
                        else:
                            counts[owner + 1] += 1
                    if writing:
                        runs[next_run[owner] - 1, 1] = position + 1
                last = state
                previous_state[b] = state
    return counts, runs
