"""The segment table equals its dense form under all operations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.every_mask import every_pattern
from raymm.errors import ModelError
from raymm.kernels.mask.mask import AttentionMask, as_masks, query_rows
from raymm.kernels.mask.patterns import causal, documents
from tests.support.random_masks import same_tables, tables


def slow_dense(mask: AttentionMask) -> torch.Tensor:
    """Return every pair separately, from the definition."""
    visible = torch.zeros(mask.shape, dtype=torch.bool)
    for q in range(mask.n_queries):
        row = mask.query_table[np.flatnonzero(mask.query_table[:, 0] <= q)[-1]].tolist()
        attend, (lo1, hi1, lo2, hi2), slopes = row[1], row[2:6], row[6:10]
        lo1, hi1, lo2, hi2 = (
            base + slope * q for base, slope in zip((lo1, hi1, lo2, hi2), slopes, strict=True)
        )
        for k in range(mask.n_keys):
            identity = mask.key_table[np.flatnonzero(mask.key_table[:, 0] <= k)[-1], 1]
            within = lo1 <= k < hi1 or lo2 <= k < hi2
            visible[q, k] = within and bool(attend & identity)
    return visible


@given(tables(24, 24))
def test_dense_is_the_definition(mask):
    dense = slow_dense(mask)
    assert torch.equal(mask.dense(), dense)
    assert mask.area() == int(dense.sum())
    assert mask.seen_keys().tolist() == dense.any(dim=0).tolist()
    assert torch.equal(mask.dense(slice(3, 9), slice(2, 20)), dense[3:9, 2:20])


@given(tables(40, square=True), st.integers(1, 20))
def test_a_window_narrows_the_first_interval_only(mask, window):
    lo1, hi1, lo2, hi2 = mask.bounds()[..., None]
    arrays = mask.rows()
    q, k = np.arange(mask.n_queries)[:, None], np.arange(mask.n_keys)
    first = (np.maximum(lo1, q - window + 1) <= k) & (k < hi1)
    kinds = (arrays.attend.numpy()[:, None] & arrays.identity.numpy()) != 0
    expected = (first | ((lo2 <= k) & (k < hi2))) & kinds
    assert np.array_equal(mask.windowed(window).dense().numpy(), expected)
    again = mask.windowed(window).windowed(window)
    assert np.array_equal(again.dense().numpy(), expected)


def test_keys_that_only_rows_in_the_middle_see():
    """Move a window across few keys: its first and last rows lie outside them."""
    mask = AttentionMask(
        query_rows([0], lo=-10, hi=-9, lo_slope=1, hi_slope=1), np.array([[0, 1]]), 31, 5
    )
    assert mask.seen_keys().all() and mask.area() == 5


def ranges(size: int, ascending: bool):
    """Draw up to three ranges within [0, size), ascending or in any order."""
    cuts = st.lists(st.integers(0, size), min_size=6, max_size=6).map(sorted)
    pairs = cuts.map(lambda c: [(c[0], c[1]), (c[2], c[3]), (c[4], c[5])])
    return pairs if ascending else pairs.flatmap(st.permutations)


@given(tables(40, 40), st.data())
def test_selected_rows_and_keys_are_those_of_the_dense_mask(mask, data):
    rows = data.draw(ranges(mask.n_queries, False))
    keys = data.draw(ranges(mask.n_keys, True))
    row_index = np.concatenate([np.arange(*r) for r in rows])
    key_index = np.concatenate([np.arange(*r) for r in keys])
    dense = mask.dense()
    assert torch.equal(mask.select_queries(rows).dense(), dense[row_index])
    assert torch.equal(mask.select_keys(keys).dense(), dense[:, key_index])
    both = mask.select_queries(rows).select_keys(keys)
    assert torch.equal(both.dense(), dense[row_index][:, key_index])


@pytest.mark.parametrize("name", every_pattern(57))
def test_kinds_only_hide_pairs_if_bits_are_needed(name):
    mask = every_pattern(57)[name]()
    lo1, hi1, lo2, hi2 = mask.bounds()[..., None]
    k = np.arange(mask.n_keys)
    intervals = ((lo1 <= k) & (k < hi1)) | ((lo2 <= k) & (k < hi2))
    if not mask.needs_bits:
        assert np.array_equal(mask.dense().numpy(), intervals)


def test_equal_neighbours_are_joined_and_tables_read_only():
    table = query_rows([0, 3, 3, 5], hi=1, hi_slope=1)
    mask = AttentionMask(table, np.array([[0, 1], [4, 1]]), 8, 8)
    assert same_tables(mask, causal(8))
    assert not same_tables(mask, documents([4, 4]))
    with pytest.raises(ValueError):
        mask.query_table[0, 0] = 1


@pytest.mark.parametrize(
    ("table", "keys", "n_queries", "said"),
    [
        (query_rows([1]), [[0, 1]], 4, "start at 0"),
        (query_rows([0, 3, 2]), [[0, 1]], 4, "ascend"),
        (query_rows([0, 9]), [[0, 1]], 4, "end by 4"),
        (query_rows([0], lo_slope=2), [[0, 1]], 4, "slopes"),
        (query_rows([0], attend=-1), [[0, 1]], 4, "63 bits"),
        (query_rows([0]), [[0, -5]], 4, "63 bits"),
        (query_rows([]), [[0, 1]], 4, "at least one query segment"),
        (query_rows([0]), [[0, 1]], -1, "negative"),
    ],
)
def test_impossible_tables_are_refused(table, keys, n_queries, said):
    with pytest.raises(ModelError, match=said):
        AttentionMask(table, np.array(keys), n_queries, 4)


def test_errors_name_the_invalid_value():
    mask = causal(8)
    with pytest.raises(ModelError, match="window must be at least 1"):
        mask.windowed(0)
    with pytest.raises(ModelError, match=r"query range \[3, 9\)"):
        mask.select_queries([(3, 9)])
    with pytest.raises(ModelError, match="ascend"):
        mask.select_keys([(4, 6), (0, 2)])
    with pytest.raises(ModelError, match="2 masks for a batch of 3"):
        as_masks([mask, mask], 3, 8, 8)
    with pytest.raises(ModelError, match="8 queries and 8 keys, the tensors have 8 and 9"):
        as_masks(mask, 2, 8, 9)


def test_one_mask_counts_for_the_whole_batch():
    mask = causal(8)
    assert as_masks(mask, 3, 8, 8) == (mask, mask, mask)
    other = documents([4, 4])
    assert as_masks([mask, other], 2, 8, 8) == (mask, other)
