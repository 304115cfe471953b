"""Work items: every tile once, heaviest first, parts of bounded length; the split rule."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.every_mask import every_pattern, table
from raymm.kernels.mask import patterns
from raymm.kernels.mask.tiles import key_runs, query_runs

pytest.importorskip("triton")

from raymm.kernels.flash.gpu.work_items import (
    ITEM_TILES,
    choose_split,
    head_span,
    makespan,
    parts_of,
    work_tables,
)


def masks():
    yield from (build() for build in every_pattern(283).values())
    yield from (table(seed, 90 + seed, 130 - seed) for seed in range(20))


def tiles_of(tables, item):
    """Return (block of the other side, full) of every tile of an item, in a kernel's order."""
    found = []
    for column, full in ((3, True), (5, False)):
        run, count = int(item[column]), int(item[column + 1])
        block, stop = tables.runs[run]
        for _ in range(count):
            found.append((int(block), full))
            if block + 1 == stop:
                run += 1
                block, stop = tables.runs[run]
            else:
                block += 1
    return found


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_tile_once(most, transposed):
    for mask in masks():
        scan, size = (query_runs, mask.n_queries) if transposed else (key_runs, mask.n_keys)
        own, other = (mask.n_keys, size) if transposed else (mask.n_queries, size)
        block_q, block_k = (16, 32)
        block = block_q if transposed else block_k
        blocks = -(-own // (block_k if transposed else block_q))
        tiles = scan(mask, block_q, block_k)
        tables = work_tables([tiles], [0], [other], block, most)
        seen = [[] for _ in range(blocks)]
        for item in tables.items:
            part = tiles_of(tables, item)
            assert most is None or len(part) <= most
            seen[item[2]] += part
        dense = mask.dense().numpy()
        dense = dense.T if transposed else dense
        size_own = block_k if transposed else block_q
        for index, found in enumerate(seen):
            rows = dense[index * size_own : (index + 1) * size_own]
            wanted = {
                b for b in range(-(-other // block)) if rows[:, b * block : (b + 1) * block].any()
            }
            assert sorted(b for b, _ in found) == sorted(wanted)
            for b, full in found:
                whole = (b + 1) * block <= other
                # Full tiles are read without a bounds check.
                assert not full or (whole and rows[:, b * block : (b + 1) * block].all())


def test_items_of_a_batch():
    mask_a, mask_b = patterns.causal(256), patterns.full(256)
    tiles = [key_runs(mask, 32, 32) for mask in (mask_a, mask_b)]
    tables = work_tables(tiles, [0, 1, 0], [256, 256], 32, 3)
    work = tables.items[:, 4] + tables.items[:, 6]
    assert (np.diff(work) <= 0).all() and work.max() <= 3
    assert sorted(set(map(tuple, tables.items[:, :2]))) == [(0, 0), (0, 2), (1, 1)]
    # A split block's parts have consecutive slots, which no other part has.
    slots = tables.items[tables.items[:, 7] >= 0]
    assert sorted(slots[:, 7]) == list(range(tables.slots))
    named = [
        (sequence, block, slot)
        for sequence, block, first, count in tables.merges
        for slot in range(first, first + count)
    ]
    assert sorted(named) == sorted(map(tuple, slots[:, [1, 2, 7]]))
    assert len(tables.merges) == len(set(map(tuple, tables.merges[:, :2])))
    assert (tables.merges[:, 3] > 1).all()
    # Causal: blocks 3 to 7 have more than 3 tiles, twice; full: all 8.
    assert len(tables.merges) == 2 * 5 + 8


def test_splitting_is_worth_it_only_for_long_blocks():
    even = np.full(512, 64)
    assert choose_split(even, 32, 132, 4.0) is None
    causal = np.arange(1, 1025)
    assert choose_split(causal, 32, 132, 4.0) is None
    # One long row among short ones, one head: its parts run concurrently.
    long = np.array([4096, *[8] * 200])
    most = choose_split(long, 1, 132, 4.0)
    assert most is not None
    parts = parts_of(long, most)
    assert makespan(np.repeat(long / parts, parts) + ITEM_TILES + 4.0, 1, 132) < 0.25 * 4096
    assert choose_split(long, 1, 132, 1e6) is None  # parts cost more than they save
    assert choose_split(np.array([3]), 1, 132, 0.0) is None  # too short
    assert choose_split(np.zeros(0, dtype=np.int64), 1, 132, 4.0) is None
    assert choose_split(long, 1, 1, 4.0) is None  # one processor


def test_makespan():
    assert makespan(np.full(10, 3.0), 1, 4) == 9.0  # three rounds
    assert makespan(np.full(5, 3.0), 2, 10) == 3.0
    assert makespan(np.array([10.0, 1.0, 1.0]), 1, 2) == 10.0
    assert makespan(np.zeros(0), 4, 2) == 0.0
    rng = np.random.default_rng(0)
    for _ in range(100):
        work = rng.integers(1, 50, rng.integers(1, 30))
        heads, processors = int(rng.integers(1, 4)), int(rng.integers(1, 9))
        assert makespan(work, heads, processors) == replay(work, heads, processors)
    many = rng.integers(1, 50, 5000)
    assert makespan(many, 2, 7) == pytest.approx(replay(many, 2, 7), rel=1e-2)


def test_splitting_shortens_a_simulated_run():
    """Replay the decision of the rule: faster than no split."""
    rng = np.random.default_rng(1)
    split = 0
    for _ in range(100):
        work = rng.integers(1, 400, rng.integers(1, 300)) ** int(rng.integers(1, 3))
        heads, cost = int(rng.integers(1, 9)), float(rng.integers(1, 20))
        most = choose_split(work, heads, 132, cost)
        whole = replay(work + ITEM_TILES, heads, 132)
        if most is None:
            continue
        split += 1
        parts = parts_of(work, most)
        extra = ITEM_TILES + np.where(parts > 1, cost, 0.0)
        assert replay(np.repeat(work / parts + extra, parts), heads, 132) < whole
    assert split > 20


def replay(work, heads, processors):
    """Assign the longest first, each to the processor that is free first."""
    free = np.zeros(processors)
    for one in np.repeat(np.sort(work)[::-1], heads):
        free[free.argmin()] += one
    return free.max()


def test_head_spans():
    assert head_span(32, 4, 1 << 20, 8 << 20) == 32
    assert head_span(32, 4, 4 << 20, 8 << 20) == 8
    assert head_span(32, 4, 64 << 20, 8 << 20) == 4
    assert head_span(24, 4, 1 << 20, 5 << 20) == 12  # 5 groups would fit, 3 divide 6
    assert head_span(7, 1, 1, 3) == 1  # 7 is prime
