"""Distributions keep their guarantees, and are optimal in small cases."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.baselines.baseline import solutions
from benchmarks.shared.exact_distribution import exact_distribution
from benchmarks.shared.token_policies import POLICIES, TOKENS
from raymm.errors import PlanError
from raymm.kernels.mask import patterns
from raymm.scheduler.context_parallel import swaps as token_swaps
from raymm.scheduler.context_parallel.distribution import TokenDistribution, balanced, distribute
from raymm.scheduler.context_parallel.workload import active_key_blocks

ALL = {"balanced": balanced, **POLICIES}
EQUAL_COUNTS = ["balanced", "contiguous", "random", "zigzag"]
WORK = st.lists(
    st.one_of(st.integers(0, 6), st.integers(0, 600), st.sampled_from([0, 117, 286, 10**6])),
    min_size=1,
    max_size=60,
)


def check(found: TokenDistribution, work: list[int], n_tokens: int) -> None:
    """Check that all fields of a distribution follow from its blocks."""
    assert sorted(itertools.chain(*found.blocks)) == list(range(len(work)))
    for rank, blocks in enumerate(found.blocks):
        assert list(blocks) == sorted(blocks)
        assert found.work[rank] == sum(work[b] for b in blocks)
        tokens = [t for start, stop in found.ranges(rank) for t in range(start, stop)]
        assert tokens == [
            t for t in range(n_tokens) if t // found.block in blocks
        ] and len(tokens) == found.tokens[rank]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found.ranges(rank)))
    assert max(found.work) >= found.bound
    assert (found.status == "optimal") == (max(found.work) == found.bound)


@given(WORK, st.integers(1, 9), st.integers(1, 5), st.data())
@pytest.mark.parametrize("policy", ALL)
def test_every_block_once_and_token_counts(policy: str, work, ranks: int, block: int, data) -> None:
    n_tokens = len(work) * block - data.draw(st.integers(0, block - 1))
    found = distribute(np.array(work), ranks, ALL[policy], n_tokens=n_tokens, block=block)
    assert found.ranks == ranks
    check(found, work, n_tokens)
    if policy in EQUAL_COUNTS:
        assert max(found.tokens) - min(found.tokens) <= block


@given(WORK, st.integers(1, 9))
def test_balanced_is_never_worse_than_its_start(work, ranks: int) -> None:
    work = np.array(work)
    order = np.argsort(-work, kind="stable")
    start = token_swaps.lpt_equal_counts(work, order, ranks, -1)[2].max()
    assert max(distribute(work, ranks).work) <= start


def best_of_all(work: list[int], ranks: int) -> int:
    """Return the smallest largest work of all assignments with counts within one."""
    base, extra = divmod(len(work), ranks)
    best = sum(work)
    for assignment in itertools.product(range(ranks), repeat=len(work)):
        counts = [assignment.count(g) for g in range(ranks)]
        if sorted(counts) == [base] * (ranks - extra) + [base + 1] * extra:
            loads = [0] * ranks
            for b, g in enumerate(assignment):
                loads[g] += work[b]
            best = min(best, max(loads))
    return best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 3))
def test_exact_is_the_best_of_all(work, ranks: int) -> None:
    exact = exact_distribution(np.array(work), ranks, 20)
    check(exact, work, len(work) * exact.block)
    assert max(exact.tokens) - min(exact.tokens) <= exact.block
    assert exact.status == "optimal" and exact.gap == 0
    assert max(exact.work) == best_of_all(work, ranks)
    assert max(exact.work) <= max(distribute(np.array(work), ranks).work)


def test_the_bound_uses_equal_counts() -> None:
    """Use two light blocks, which cannot relieve all of four ranks."""
    found = distribute(np.array([9] * 14 + [1, 1]), 4)
    assert max(found.work) == found.bound == 36 and found.status == "optimal"
    assert sum(found.work) / 4 < 33


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 3))
def test_bound_is_one(work, ranks: int) -> None:
    assert distribute(np.array(work), ranks).bound <= best_of_all(work, ranks)


@given(
    st.lists(st.sampled_from([1, 2, 30, 40]), min_size=1, max_size=8), st.integers(1, 3)
)
@example([40, 40, 40, 1, 1, 1, 2, 2], 2)
@example([40, 40, 1, 1, 1, 1, 1, 1], 3)
def test_the_bound_is_one_with_few_heavy_blocks(work, ranks: int) -> None:
    assert distribute(np.array(work), ranks).bound <= best_of_all(work, ranks)


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("block", [64, 128, 256, 512])
def test_causal_blockwise_is_proven_optimal(ranks: int, block: int) -> None:
    """Check that ranks with a heavy block cannot all have the lightest others.

    Without that, the bound of 32 ranks is up to 0.1 lower.
    """
    mask = patterns.causal_blockwise(1 << 16, block, 3)
    work = active_key_blocks(mask.query_table, mask.key_table, *mask.shape)
    found = distribute(work, ranks)
    assert found.status == "optimal" and found.gap == 0


def test_exact_reports_a_time_limit() -> None:
    """Use works without small common sums, on many ranks: no proof in a hundredth of a second."""
    work = np.random.default_rng(1).integers(1, 10**6, 90)
    found = exact_distribution(work, 30, 0.01)
    assert found.status == "feasible" and found.gap > 0
    assert max(found.work) <= max(distribute(work, 30).work)


@given(WORK, st.integers(1, 9), st.sampled_from(["lpt", "paper_lpt"]))
def test_lpt_gives_to_the_least_loaded(work, ranks: int, policy: str) -> None:
    found = distribute(np.array(work), ranks, ALL[policy])
    where = {b: g for g, blocks in enumerate(found.blocks) for b in blocks}
    by_work = np.argsort(-np.array(work), kind="stable").tolist()
    order = range(len(work)) if policy == "paper_lpt" else by_work
    load = [0] * ranks
    for b in order:
        assert load[where[b]] == min(load)
        load[where[b]] += work[b]


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        ("contiguous", ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))),
        ("zigzag", ((0, 1, 8, 9), (2, 6, 7), (3, 4, 5))),
    ],
)
def test_plain_policies(policy: str, blocks) -> None:
    assert distribute(np.ones(10, dtype=np.int64), 3, ALL[policy]).blocks == blocks


def test_zigzag_balances_causal() -> None:
    found = distribute(np.arange(1, 65), 8, ALL["zigzag"])
    assert found.imbalance == 1.0
    assert found.ranges(1) == ((4 * 128, 8 * 128), (56 * 128, 60 * 128))


def test_random_is_seeded() -> None:
    work = np.arange(100)
    assert distribute(work, 7, ALL["random"], seed=3) == distribute(work, 7, ALL["random"], seed=3)
    assert distribute(work, 7, ALL["random"], seed=3) != distribute(work, 7, ALL["random"], seed=4)


def multimodal_work(generator: np.random.Generator, blocks: int) -> np.ndarray:
    """Return work like an embedded sequence: text sees earlier tokens, others a constant."""
    work = np.arange(1, blocks + 1)
    other = generator.random(blocks) < 0.75
    work[other] = np.where(generator.random(blocks) < 0.3, blocks // 4, blocks // 2)[other]
    return work


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("blocks", "ranks", "most"), [(8192, 8, 1.0002), (8192, 64, 1.0002),
                                                       (512, 8, 1.0005), (512, 64, 1.010)])
def test_balanced_reaches_its_target(seed: int, blocks: int, ranks: int, most: float) -> None:
    work = multimodal_work(np.random.default_rng(seed), blocks)
    found = distribute(work, ranks)
    assert found == distribute(work.copy(), ranks)
    assert len(set(found.tokens)) == 1
    assert found.imbalance <= most
    for policy in ("contiguous", "zigzag", "random"):
        assert found.imbalance < distribute(work, ranks, ALL[policy]).imbalance


def test_lpt_as_printed_is_worse_than_sorted() -> None:
    work = multimodal_work(np.random.default_rng(0), 512)
    printed, sorted_first = (distribute(work, 64, ALL[p]) for p in ("paper_lpt", "lpt"))
    assert printed.imbalance > 1.05 > sorted_first.imbalance


def test_lpt_leaves_tokens_uneven() -> None:
    """Use a few heavy blocks, whose ranks get no others."""
    found = distribute(np.array([100, 100] + [1] * 98), 4, ALL["lpt"])
    assert found.token_imbalance > 1.9
    assert distribute(np.array([100, 100] + [1] * 98), 4).token_imbalance == 1.0


def test_plain_data() -> None:
    found = distribute(np.array([3, 1, 2]), 2)
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(distribute(np.array([3, 1, 2]), 2))
    assert all(type(b) is int for blocks in found.blocks for b in blocks)
    assert all(type(value) is int for value in (*found.work, *found.tokens, found.bound))


def test_nothing_to_distribute() -> None:
    for policy in ALL:
        found = distribute(np.zeros(0, dtype=np.int64), 3, ALL[policy])
        assert found.blocks == ((), (), ()) and found.imbalance == 1.0 and found.gap == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"n_tokens": 1000}, "n_tokens = 1000 makes 8 blocks of 128 tokens, work has 3"),
        ({"work": np.array([1, -2, 3])}, "work must not be negative, got -2 for block 1"),
        ({"work": np.array([1.5, 2, 3])}, "work must be integers, one per block, got float64"),
        ({"work": np.ones((3, 1), dtype=int)}, r"got int64 of shape \(3, 1\)"),
        ({"work": np.array([1 << 61, 1, 1])}, "the sum of work must be below"),
    ],
)
def test_what_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        distribute(**({"work": np.array([1, 2, 3]), "ranks": 2} | changes))


def test_baselines_are_solved_from_the_same_problem() -> None:
    work = np.arange(1, 65)
    solved = solutions(TOKENS, (work, 4))
    assert {name: found.policy for name, found in solved.items()} == {n: n for n in POLICIES}
    (reason,) = set(solutions(TOKENS, (work, 0)).values())
    assert reason == "ranks must be at least 1, got 0"
