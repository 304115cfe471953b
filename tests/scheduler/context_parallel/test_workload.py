"""Counts of active key blocks from tables equal those of the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from raymm.scheduler.context_parallel.workload import active_key_blocks

KINDS = st.sampled_from([0, 1, 2, 3, 4, 6, 1 << 62, (1 << 63) - 1])


def dense(query, key, n_queries: int, n_keys: int) -> np.ndarray:
    """Return a (n_queries, n_keys) bool mask, row by row and key by key."""
    visible = np.zeros((n_queries, n_keys), dtype=bool)
    for q in range(n_queries):
        row = [r for r in query if r[0] <= q][-1]
        lo1, hi1, lo2, hi2 = (row[2 + i] + row[6 + i] * q for i in range(4))
        for k in range(n_keys):
            identity = [r for r in key if r[0] <= k][-1][1]
            within = lo1 <= k < hi1 or lo2 <= k < hi2
            visible[q, k] = within and (row[1] & identity) != 0
    return visible


def count_tiles(visible: np.ndarray, query_block: int, key_block: int) -> list[int]:
    """Return active tiles per block of rows, counted one by one."""
    n_queries, n_keys = visible.shape
    return [
        sum(
            bool(visible[q : q + query_block, k : k + key_block].any())
            for k in range(0, n_keys, key_block)
        )
        for q in range(0, n_queries, query_block)
    ]


@st.composite
def tables(draw) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Draw any tables: empty and repeated segments, bounds outside the keys, hidden kinds."""
    n_queries, n_keys = draw(st.integers(0, 40)), draw(st.integers(0, 40))

    def starts(size: int) -> list[int]:
        if not size:
            return []
        return [0, *sorted(draw(st.lists(st.integers(0, size), max_size=9)))]

    bound, slope = st.integers(-45, 85), st.integers(0, 1)
    query = [
        [start, draw(KINDS), *(draw(bound) for _ in range(4)), *(draw(slope) for _ in range(4))]
        for start in starts(n_queries)
    ]
    key = [[start, draw(KINDS)] for start in starts(n_keys)]
    return (
        np.array(query, dtype=np.int64).reshape(-1, 10),
        np.array(key, dtype=np.int64).reshape(-1, 2),
        n_queries,
        n_keys,
    )


BLOCKS = st.sampled_from([1, 2, 3, 4, 5, 8, 13, 16, 64])


@given(tables(), BLOCKS, BLOCKS)
# A window of constant width moves past the last key: no row is visible at either end.
@example(
    (np.array([[0, 1, -9, -5, 0, 0, 1, 1, 0, 0]]), np.array([[0, 1]]), 40, 20), 64, 8
)
def test_equals_the_dense_count(case, query_block: int, key_block: int) -> None:
    query, key, n_queries, n_keys = case
    found = active_key_blocks(
        query, key, n_queries, n_keys, query_block=query_block, key_block=key_block
    )
    assert found.dtype == np.int64
    assert found.tolist() == count_tiles(
        dense(query, key, n_queries, n_keys), query_block, key_block
    )


@given(st.data())
def test_more_attend_values_than_prefix_counts(data) -> None:
    """Give every row separate attend bits, with several hundred key blocks."""
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n_queries, n_keys = 90, 400
    query = np.zeros((n_queries, 10), dtype=np.int64)
    query[:, 0] = np.arange(n_queries)
    query[:, 1] = generator.integers(1, 1 << 20, n_queries)
    query[:, 2] = generator.integers(0, n_keys, n_queries)
    query[:, 3] = generator.integers(0, n_keys, n_queries)
    query[:, 4] = generator.integers(0, n_keys, n_queries)
    query[:, 5] = query[:, 4] + generator.integers(0, 90, n_queries)
    key = np.stack([np.arange(n_keys), 1 << generator.integers(0, 20, n_keys)], axis=1)
    mask = AttentionMask(query, key, n_queries, n_keys)
    assert active_key_blocks(
        query, key, n_queries, n_keys, query_block=1, key_block=2
    ).tolist() == count_tiles(mask.dense().numpy(), 1, 2)


def random_spans(generator: np.random.Generator, length: int, count: int) -> list[Span]:
    edges = np.sort(generator.choice(length + 1, 2 * count, replace=False)).tolist()
    return [
        Span(edges[2 * i], edges[2 * i + 1], int(generator.integers(1, 4)))
        for i in range(count)
    ]


SPANS = random_spans(np.random.default_rng(7), 1000, 9)
MASKS = {
    "full": patterns.full(1000, 700),
    "causal": patterns.causal(1000),
    "sliding window": patterns.causal(1000, 100),
    "documents": patterns.documents([300, 1, 0, 199, 500]),
    "EP": patterns.prepended([(1, 200), (2, 300), (1, 77)], 423),
    "EE": patterns.embedded(1000, SPANS),
    "EE isolated": patterns.embedded(1000, SPANS, isolate=True),
    "MP": patterns.packed([400, 600], [Span(7, 150), Span(420, 700, 2)]),
    "EE window": patterns.multimodal(1000, SPANS, window=64),
    "own image": patterns.causal_with_own_image(1000, SPANS, window=90),
    "prefix": patterns.prefix_causal(1000, [100, 300], [450, 550]),
    "lambda": patterns.sinks_and_window(1000, 16, 128),
    "blockwise": patterns.causal_blockwise(1000, 64),
    "shared question": patterns.shared_question(200, [300, 100, 250, 150]),
    "cross": patterns.cross_images(1000, [10, 300, 700], [120, 57, 200]),
    "cross, all before": patterns.cross_images(
        1000, [10, 300, 700], [120, 57, 200], document_lengths=[290, 710], only_last=False
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("blocks", [(128, 128), (64, 32), (100, 48), (7, 130)])
def test_patterns(name: str, blocks: tuple[int, int]) -> None:
    mask, (query_block, key_block) = MASKS[name], blocks
    found = active_key_blocks(
        mask.query_table, mask.key_table, *mask.shape,
        query_block=query_block, key_block=key_block,
    )
    assert found.tolist() == count_tiles(mask.dense().numpy(), query_block, key_block)


def test_a_million_causal_tokens() -> None:
    mask = patterns.causal(1 << 20)
    found = active_key_blocks(mask.query_table, mask.key_table, *mask.shape)
    assert found.tolist() == list(range(1, 8193))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_keys": -1}, "n_keys must be at least 0, got -1"),
        ({"query_block": 0}, "query_block must be at least 1, got 0"),
        ({"key_block": -2}, "key_block must be at least 1, got -2"),
        ({"query_table": np.zeros((1, 9))}, r"query_table must be \(segments, 10\)"),
        ({"key_table": np.zeros(2)}, r"key_table must be \(segments, 2\)"),
        ({"query_table": np.zeros((0, 10))}, "query_table has no segment for 5"),
        ({"key_table": np.ones((1, 2))}, "key_table: segments must start at 0"),
        ({"query_table": np.full((1, 10), 0) + np.eye(1, 10, 7) * 2}, "slopes must be 0 or 1"),
    ],
)
def test_what_is_refused(changes: dict, message: str) -> None:
    arguments = {
        "query_table": np.zeros((1, 10)), "key_table": np.zeros((1, 2)),
        "n_queries": 5, "n_keys": 5,
    }
    with pytest.raises(PlanError, match=message):
        active_key_blocks(**(arguments | changes))
