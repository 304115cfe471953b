"""Tiles: a run of blocks for every tile with a visible pair, and for no other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.mask.mask import AttentionMask, query_rows
from raymm.kernels.mask.patterns import causal, documents
from raymm.kernels.mask.tiles import Tiles, key_runs, query_runs
from tests.support.random_masks import tables

NONE, PARTIAL, FULL = 0, 1, 2


def slow_states(mask, block_q: int, block_k: int) -> np.ndarray:
    """Return none, some or all for the visible pairs of every tile, from the dense mask."""
    dense = mask.dense().numpy()
    n_q, n_k = -(-mask.n_queries // block_q), -(-mask.n_keys // block_k)
    states = np.zeros((n_q, n_k), dtype=int)
    for i in range(n_q):
        for j in range(n_k):
            tile = dense[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            states[i, j] = FULL if tile.all() else PARTIAL if tile.any() else NONE
    return states


def states_of(tiles: Tiles, columns: int) -> np.ndarray:
    """Expand runs; fail for a tile in two runs, or an empty or descending run."""
    states = np.zeros((len(tiles.offsets) - 1, columns), dtype=int)
    for row in range(len(states)):
        before = 0
        for start, stop, full in tiles.runs[tiles.offsets[row] : tiles.offsets[row + 1]]:
            assert before <= start < stop <= columns
            states[row, start:stop] = FULL if full else PARTIAL
            before = stop
    return states


def check(mask, block_q: int, block_k: int) -> int:
    """Return the number of full tiles marked as partial, which costs time but not accuracy."""
    expected = slow_states(mask, block_q, block_k)
    tiles = key_runs(mask, block_q, block_k)
    states = states_of(tiles, expected.shape[1])
    assert np.array_equal(states > 0, expected > 0)
    assert (expected[states == FULL] == FULL).all()
    assert np.array_equal(tiles.work, (expected > 0).sum(axis=1))
    turned = states_of(query_runs(mask, block_q, block_k), expected.shape[0])
    assert np.array_equal(turned, states.T)
    return int(((expected == FULL) & (states == PARTIAL)).sum())


@given(tables(60, 60), st.integers(1, 12), st.integers(1, 12))
def test_tiles_of_any_table(mask, block_q, block_k):
    check(mask, block_q, block_k)


@pytest.mark.parametrize("name", every_pattern(283))
@pytest.mark.parametrize("blocks", [(16, 16), (32, 8), (7, 33)])
def test_tiles_of_patterns(name, blocks):
    assert check(every_pattern(283)[name](), *blocks) == 0


def test_a_causal_mask_has_two_runs_per_block():
    tiles = key_runs(causal(640), 64, 64)
    assert len(tiles.runs) == 19
    assert tiles.work.tolist() == list(range(1, 11))


def test_documents_have_no_tiles_across():
    tiles = key_runs(documents([128, 128]), 64, 64)
    assert tiles.work.tolist() == [1, 2, 1, 2]


def test_a_window_that_moves_across_few_keys_has_tiles():
    table = query_rows([0], lo=-10, hi=-9, lo_slope=1, hi_slope=1)
    mask = AttentionMask(table, np.array([[0, 1]]), 31, 5)
    for block_q in (4, 31):
        for block_k in (2, 5):
            check(mask, block_q, block_k)


def test_rows_that_look_past_the_last_key_have_no_tile():
    table = query_rows([0], lo=-1, hi=0, lo_slope=1, hi_slope=1)
    mask = AttentionMask(table, np.array([[0, 1]]), 4, 1)
    assert key_runs(mask, 1, 2).work.tolist() == [0, 1, 0, 0]
    check(mask, 1, 2)


def test_blocks_below_one_are_refused():
    with pytest.raises(ValueError, match="block_q 0"):
        key_runs(causal(8), 0, 4)
