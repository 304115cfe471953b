"""Which tiles of the score matrix a mask needs, as runs of blocks.

A tile is (a block of query rows) x (a block of keys). Runs, not dense tile maps: at a million
tokens those would be hundreds of megabytes. A run is *full* if every pair of its tiles is
visible, so that a kernel can leave the mask test out; tiles that might be are *partial*.
Made on the host from the segment table, in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from raymm.kernels.mask.columns import BASES, SLOPES
from raymm.kernels.mask.mask import AttentionMask

_NONE, _PARTIAL, _FULL = 0, 1, 2


@dataclass(frozen=True)
class Tiles:
    """Runs of active blocks of one side, per block of the other.

    Attributes:
        block_q, block_k: rows and keys of a tile.
        offsets: (n + 1,) int64: block ``i`` has runs ``offsets[i]`` to ``offsets[i + 1]``.
        runs: (R, 3) int32: first block, one past the last, 1 if full else 0; ascending.
    """

    block_q: int
    block_k: int
    offsets: np.ndarray
    runs: np.ndarray

    @property
    def work(self) -> np.ndarray:
        """(n,) int64: active tiles per block."""
        lengths = (self.runs[:, 1] - self.runs[:, 0]).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(lengths)])
        return before[self.offsets[1:]] - before[self.offsets[:-1]]


def key_runs(mask: AttentionMask, block_q: int, block_k: int) -> Tiles:
    """Per block of ``block_q`` query rows, runs of the active blocks of ``block_k`` keys.

    A tile without a visible pair is in no run; a tile with one is in exactly one.

    Args:
        mask: of one sequence.
        block_q: rows of a tile.
        block_k: keys of a tile.

    Raises:
        ValueError: a block below 1.
    """
    offsets, runs = _scan(mask, block_q, block_k, False)
    return Tiles(block_q, block_k, offsets, runs)


def query_runs(mask: AttentionMask, block_q: int, block_k: int) -> Tiles:
    """The same tiles from the other side: per block of keys, runs of blocks of query rows.

    Args:
        mask: of one sequence.
        block_q: rows of a tile.
        block_k: keys of a tile.
    """
    offsets, runs = _scan(mask, block_q, block_k, True)
    return Tiles(block_q, block_k, offsets, runs)


def _scan(
    mask: AttentionMask, block_q: int, block_k: int, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    if block_q < 1 or block_k < 1:
        raise ValueError(f"blocks must be at least 1, got block_q {block_q}, block_k {block_k}")
    attends, kind = np.unique(mask.query_table[:, 1], return_inverse=True)
    found = _key_states(attends, mask.key_table, mask.key_stops, mask.n_keys, block_k)
    rows = (
        mask.query_table[:, 0],
        mask.query_stops,
        np.ascontiguousarray(mask.query_table[:, BASES]),
        np.ascontiguousarray(mask.query_table[:, SLOPES]),
        kind.astype(np.int64),
    )
    keys = (mask.key_table[:, 0], mask.key_stops, mask.key_table[:, 1], attends, found)
    return _runs(rows, keys, mask.n_queries, mask.n_keys, block_q, block_k, transposed)


@njit(cache=True)
def _key_states(attends, key_table, key_stops, n_keys, block_k):
    """(kinds of query, key blocks) uint8: whether none, some or all keys of a block match."""
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


@njit(cache=True)
def _any_match(keys, attend, lo, hi):
    """Whether a key of [lo, hi) has an identity that ``attend`` has a bit of."""
    starts, stops, identity = keys[0], keys[1], keys[2]
    s = np.searchsorted(starts, lo, side="right") - 1
    while s < len(starts) and starts[s] < hi:
        if identity[s] & attend and stops[s] > lo:
            return True
        s += 1
    return False


@njit(cache=True)
def _bound(rows, segment, which, q):
    return rows[2][segment, which] + rows[3][segment, which] * q


@njit(cache=True)
def _add_piece(rows, keys, segment, q0, q1, n_keys, block_k, some, every):
    """Enter rows [q0, q1) of one segment into ``some`` (a pair is visible) and count the
    pieces that see the whole block into ``every``.

    Bounds move by 0 or 1 per row, so the keys that some row sees through one interval are
    contiguous, from the first row's lower to the last row's upper bound (there are some if the
    first or the last row's interval is not empty); what all rows see is from the last row's
    lower to the first row's upper bound.
    """
    kind = rows[4][segment]
    attend, states = keys[3][kind], keys[4][kind]
    for i in (0, 2):
        lo0, hi0 = _bound(rows, segment, i, q0), _bound(rows, segment, i + 1, q0)
        lo1, hi1 = _bound(rows, segment, i, q1 - 1), _bound(rows, segment, i + 1, q1 - 1)
        if lo0 >= hi0 and lo1 >= hi1:
            continue
        lo0, hi1 = max(lo0, 0), min(hi1, n_keys)
        if lo0 >= hi1:
            continue
        for b in range(lo0 // block_k, -(-hi1 // block_k)):
            if some[b] or states[b] == _NONE:
                continue
            start, stop = b * block_k, min((b + 1) * block_k, n_keys)
            inner = lo0 <= start and stop <= hi1
            if inner or states[b] == _FULL:
                some[b] = True
            else:
                some[b] = _any_match(keys, attend, max(start, lo0), min(stop, hi1))
    # What all rows see: two ranges, or one where they touch.
    a0, a1 = max(_bound(rows, segment, 0, q1 - 1), 0), min(_bound(rows, segment, 1, q0), n_keys)
    b0, b1 = max(_bound(rows, segment, 2, q1 - 1), 0), min(_bound(rows, segment, 3, q0), n_keys)
    if a0 < a1 and b0 < b1 and a0 <= b1 and b0 <= a1:
        a0, a1 = min(a0, b0), max(a1, b1)
        b0 = b1 = 0
    for lo, hi in ((a0, a1), (b0, b1)):
        for b in range(-(-lo // block_k), -(-hi // block_k)):
            if min((b + 1) * block_k, n_keys) <= hi and states[b] == _FULL:
                every[b] += 1


@njit(cache=True)
def _runs(rows, keys, n_queries, n_keys, block_q, block_k, transposed):
    """Scan blocks of query rows in order; runs per query block, or (transposed) per key block,
    counted in a first pass and written in a second."""
    n_q, n_k = -(-n_queries // block_q), -(-n_keys // block_k)
    n = n_k if transposed else n_q
    counts = np.zeros(n + 1, dtype=np.int64)
    runs = np.empty((0, 3), dtype=np.int32)
    some = np.zeros(n_k, dtype=np.bool_)
    every = np.zeros(n_k, dtype=np.int64)
    before = np.zeros(n_k, dtype=np.uint8)  # state in the query block above (transposed)
    for writing in (False, True):
        if writing:
            for i in range(n):
                counts[i + 1] += counts[i]
            runs = np.empty((counts[n], 3), dtype=np.int32)
        at = counts.copy()  # where the next run of each block goes
        before[:] = _NONE
        segment = 0
        for i in range(n_q):
            q0, q1 = i * block_q, min((i + 1) * block_q, n_queries)
            some[:] = False
            every[:] = 0
            pieces = 0
            while rows[1][segment] <= q0:
                segment += 1
            here = segment
            while here < len(rows[0]) and rows[0][here] < q1:
                lo, hi = max(q0, rows[0][here]), min(q1, rows[1][here])
                _add_piece(rows, keys, here, lo, hi, n_keys, block_k, some, every)
                pieces += 1
                here += 1
            last = _NONE
            for b in range(n_k):
                state = _NONE
                if some[b]:
                    state = _FULL if every[b] == pieces else _PARTIAL
                last_state = before[b] if transposed else last
                owner, position = (b, i) if transposed else (i, b)
                if state != _NONE:
                    if state != last_state:
                        if writing:
                            runs[at[owner], 0] = position
                            runs[at[owner], 2] = 1 if state == _FULL else 0
                            at[owner] += 1
                        else:
                            counts[owner + 1] += 1
                    if writing:
                        runs[at[owner] - 1, 1] = position + 1
                last = state
                before[b] = state
    return counts, runs
