"""Uneven counts: within their limit, only if they save time, never below the bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.kernels.mask import patterns
from raymm.scheduler.context_parallel.distribution import LEAST_GAIN, distribute, most_blocks
from raymm.scheduler.context_parallel.workload import active_key_blocks

WORK = st.lists(
    st.one_of(st.integers(0, 6), st.integers(0, 600), st.sampled_from([0, 900])),
    min_size=1, max_size=60,
)  # fmt: skip


@given(WORK, st.integers(1, 9), st.integers(0, 400))
@example([0] * 6 + [600, 600], 2, 0)
def test_limits_of_uneven_counts(work: list[int], ranks: int, token_work: int) -> None:
    found = distribute(np.array(work), ranks, token_work=token_work)
    equal = distribute(np.array(work), ranks)
    assert sorted(itertools.chain(*found.blocks)) == list(range(len(work)))
    counts = [len(blocks) for blocks in found.blocks]
    assert max(counts) <= most_blocks(len(work), ranks)
    costs = [
        sum(work[block] + token_work for block in blocks) for blocks in found.blocks
    ]
    assert list(found.costs) == costs
    assert max(costs) >= found.bound
    assert (found.status == "optimal") == (max(costs) == found.bound)
    largest = max(sum(work[b] + token_work for b in blocks) for blocks in equal.blocks)
    if found.blocks == equal.blocks:
        assert max(costs) == largest
    else:
        assert token_work and max(costs) <= (1 - LEAST_GAIN) * largest


def least_cost(costs: list[int], ranks: int) -> int:
    """Return the smallest largest cost of all assignments with as many blocks as are allowed."""
    most, best = most_blocks(len(costs), ranks), sum(costs)
    for assignment in itertools.product(range(ranks), repeat=len(costs)):
        if all(assignment.count(rank) <= most for rank in range(ranks)):
            loads = [0] * ranks
            for cost, rank in zip(costs, assignment, strict=True):
                loads[rank] += cost
            best = min(best, max(loads))
    return best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 20))
@example([50, 1, 1, 1, 1, 1], 2, 9)
@example([0, 0, 0, 0], 2, 1)
def test_uneven_counts_are_near_the_optimum(work: list[int], ranks: int, token_work: int) -> None:
    """Compare bound and result with the optimum.

    The result may differ by changes that are not worth it, and by one swap that the exchanges
    missed.
    """
    found = distribute(np.array(work), ranks, token_work=token_work)
    least = least_cost([one + token_work for one in work], ranks)
    assert found.bound <= least <= max(found.costs)
    assert max(found.costs) <= 1.2 * least


def test_one_block_that_sees_everything() -> None:
    """Use 128k tokens over 32: equal counts cannot improve, and one additional block for others
    can.
    """
    mask = patterns.causal_blockwise(1 << 17)
    work = active_key_blocks(mask.query_table, mask.key_table, *mask.shape)
    equal = distribute(work, 32)
    assert equal.imbalance > 4 and equal.gap < 0.01
    token_work = 7607 // 128  # a model of eight billion parameters
    alone = max(equal.work) + token_work * len(work) // 32
    found = distribute(work, 32, token_work=token_work)
    assert max(found.costs) < 0.72 * alone
    assert max(found.costs) * found.ranks < 1.05 * sum(found.costs)
    assert max(found.tokens) == (32 + 1) * 128
    assert min(found.tokens) < 32 * 128


@pytest.mark.parametrize("seed", range(5))
def test_documents_keep_equal_counts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = [int(length) + 1 for length in generator.lognormal(7, 1, 40)]
    mask = patterns.documents([*lengths, -sum(lengths) % (128 * 8)])
    work = active_key_blocks(mask.query_table, mask.key_table, *mask.shape)
    assert len(set(distribute(work, 8, token_work=20).tokens)) == 1


def test_work_that_is_refused() -> None:
    with pytest.raises(PlanError, match="token_work must be at least 0, got -1"):
        distribute(np.array([1, 2]), 2, token_work=-1)
    with pytest.raises(PlanError, match="the sum of work must be below"):
        distribute(np.array([1, 2]), 2, token_work=1 << 60)
