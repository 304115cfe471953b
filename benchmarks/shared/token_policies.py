"""Token distributions over context-parallel ranks that ``balanced`` is compared with.

All except the two LPT policies give every rank the same number of tokens to within one block.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from benchmarks.baselines.baseline import Baseline
from raymm.scheduler.context_parallel.distribution import (
    Policy,
    TokenDistribution,
    any_counts_bound,
    descending,
    distribute,
)
from raymm.scheduler.context_parallel.swaps import sift_down


def contiguous(
    work: np.ndarray, ranks: int, pinned: int = -1, seed: int = 0
) -> tuple[np.ndarray, int]:
    """Assign one contiguous range per rank (ring attention's policy).

    Arguments and result follow :data:`raymm.scheduler.context_parallel.distribution.Policy`.
    """
    counts = _counts(len(work), ranks, long_first=False)
    return np.repeat(np.arange(ranks), counts), any_counts_bound(work, ranks)


def zigzag(
    work: np.ndarray, ranks: int, pinned: int = -1, seed: int = 0
) -> tuple[np.ndarray, int]:
    """Assign one range from the head and its mirror from the tail; balances only causal masks.

    Arguments and result follow :data:`raymm.scheduler.context_parallel.distribution.Policy`.
    """
    # Rank r has chunks r and 2 * ranks - 1 - r; the first ranks have one additional block.
    each = len(work) // (2 * ranks)
    head = np.full(ranks, each)
    tail = _counts(len(work), ranks, long_first=True) - head
    # If each rank gets two additional blocks, one belongs to the head.
    head += tail > each + 1
    tail = _counts(len(work), ranks, long_first=True) - head
    numbers = np.arange(ranks)
    return (
        np.repeat(np.concatenate([numbers, numbers[::-1]]), np.concatenate([head, tail[::-1]])),
        any_counts_bound(work, ranks),
    )


def random(
    work: np.ndarray, ranks: int, pinned: int = -1, seed: int = 0
) -> tuple[np.ndarray, int]:
    """Assign random blocks, the same number to every rank.

    Arguments and result follow :data:`raymm.scheduler.context_parallel.distribution.Policy`.
    """
    order = np.random.default_rng(seed).permutation(len(work))
    if pinned >= 0:  # to the front, where ranks have one additional block
        at = int(np.flatnonzero(order == pinned)[0])
        order[[0, at]] = order[[at, 0]]
    rank_of = np.empty(len(work), dtype=np.int64)
    rank_of[order] = np.arange(len(work)) % ranks
    return rank_of, any_counts_bound(work, ranks)


def lpt(
    work: np.ndarray, ranks: int, pinned: int = -1, seed: int = 0
) -> tuple[np.ndarray, int]:
    """Assign the heaviest block first to the least loaded rank, without regard to token counts.

    The policy of Cornstarch v1, App. A (Graham 1969). Arguments and result follow
    :data:`raymm.scheduler.context_parallel.distribution.Policy`.
    """
    return _assigned(work, descending(work), ranks), any_counts_bound(work, ranks)


def paper_lpt(
    work: np.ndarray, ranks: int, pinned: int = -1, seed: int = 0
) -> tuple[np.ndarray, int]:
    """Apply :func:`lpt` in order of position, as Cornstarch v2's Algorithm 1 is printed.

    Arguments and result follow :data:`raymm.scheduler.context_parallel.distribution.Policy`.
    """
    return _assigned(work, np.arange(len(work)), ranks), any_counts_bound(work, ranks)


@njit(cache=True)
def _assigned(work, order, ranks):
    """Assign blocks in the given order, each to the least loaded rank; return the (n,) ranks."""
    rank_of = np.empty(order.shape[0], np.int64)
    heap, loads = np.arange(ranks), np.zeros(ranks, np.int64)
    for block in order:
        rank_of[block] = heap[0]
        loads[heap[0]] += work[block]
        sift_down(heap, ranks, loads)
    return rank_of


def _counts(blocks: int, ranks: int, long_first: bool) -> np.ndarray:
    """Return the number of blocks per rank, equal to within one."""
    number = np.arange(ranks)
    longer = number < blocks % ranks if long_first else number >= ranks - blocks % ranks
    return blocks // ranks + longer


POLICIES: dict[str, Policy] = {
    "contiguous": contiguous, "zigzag": zigzag, "random": random, "lpt": lpt,
    "paper_lpt": paper_lpt,
}


def _baseline(
    name: str, source: str
) -> Baseline[tuple[np.ndarray, int], TokenDistribution]:
    return Baseline(name, source, lambda problem: distribute(*problem, POLICIES[name]))


TOKENS = (
    _baseline("contiguous", "ring attention"),
    _baseline("zigzag", "head and mirrored tail, for causal masks"),
    _baseline("random", "drawn"),
    _baseline("lpt", "Graham 1969, Cornstarch v1 App. A"),
    _baseline("paper_lpt", "Cornstarch v2, Algorithm 1 as printed"),
)
"""Policies: (work per block, number of ranks) -> distribution."""
