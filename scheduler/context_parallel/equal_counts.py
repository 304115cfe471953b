"""Equal counts of blocks with equal work, and lower bounds for any distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from raymm.scheduler.context_parallel import swaps as token_swaps

# ``balanced`` stops within this relative distance of its lower bound,
TOLERANCE = 5e-5
# or after this many comparisons, about a millisecond.
BUDGET = 300_000


Policy = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, int]]
"""Function of (work, ranks, pinned, seed) that returns the (blocks,) rank of every block and a
lower bound of the largest work of a rank. ``work`` is (blocks,) integers in any unit. ``pinned`` is
a block that must go to a rank with one block more, or -1. ``seed`` is for random policies."""


def balanced(work: np.ndarray, ranks: int, pinned: int, seed: int) -> tuple[np.ndarray, int]:
    """Balance counts and work: LPT with equal cardinality, then exchanges between ranks. The result
    is deterministic and takes milliseconds.

    Args:
        work: (blocks,) int64, work per block.
        pinned: a block that must go to a rank with one block more, or -1.

    Returns:
        The (blocks,) rank of every block, and a lower bound of the largest work of a rank.
    """
    order = descending(work)
    members, counts, loads = token_swaps.lpt_equal_counts(work, order, ranks, pinned)
    bound = _equal_counts_bound(work, order, ranks)
    token_swaps.exchange(work, members, counts, loads, int(bound * (1 + TOLERANCE)), BUDGET)
    if len(work) and loads.max() > bound * (1 + TOLERANCE):
        bound = int(_crowded_bound(_heaviest(work, order), ranks, bound))
    return token_swaps.ranks_of(members, counts, len(work)), bound


def descending(work: np.ndarray) -> np.ndarray:
    """Return the blocks by descending work; blocks of equal work keep their order."""
    if not len(work):
        return np.zeros(0, dtype=np.int64)
    below = work.max() - work
    return np.argsort(below.astype(np.uint16) if below.max() < 1 << 16 else below, kind="stable")


@njit(cache=True)
def _crowded_bound(before, ranks, bound):
    """Return a lower bound of the largest work for counts equal to within one, which is tight if
    few blocks are heavy. ``before`` is the (blocks + 1,) int64 cumulative work of the heaviest
    blocks.

    Take the ``k * ranks + h`` heaviest blocks (h from 1 to ranks). If every rank has at least k of
    them and g ranks have more, these g ranks have at least ``g * k + h``, and other blocks fill up
    their counts. The lightest blocks of both kinds bound their total work, which is at most g times
    the largest work. The bound is the minimum over g; g is at most h, or one more block per rank is
    enough.
    """
    blocks = before.shape[0] - 1
    least_count = blocks // ranks
    for top in range(1, blocks + 1):
        k = (top - 1) // ranks
        h = top - k * ranks
        least = before[blocks]
        for g in range(h, 0, -1):
            heavy = g * k + h
            light = max(0, g * least_count - heavy)
            work = before[top] - before[top - heavy] + before[blocks] - before[blocks - light]
            if work <= bound * g:  # the usual case: this top does not improve the bound
                least = bound
                break
            least = min(least, -(-work // g))
        bound = max(bound, least)
    return bound


def _equal_counts_bound(work: np.ndarray, order: np.ndarray, ranks: int) -> int:
    """Return a lower bound of the largest work for counts equal to within one. For every k, some
    rank has k + 1 of the k * ranks + 1 heaviest blocks, and other blocks that fill up its count;
    its work is at least that of the lightest blocks of both kinds."""
    cumulative = _heaviest(work, order)
    heavy = np.arange(0, len(work), ranks)  # k * ranks
    k = np.arange(len(heavy))
    lightest = len(work) - np.maximum(len(work) // ranks - 1 - k, 0)
    least = cumulative[heavy + 1] - cumulative[heavy - k] + cumulative[-1] - cumulative[lightest]
    return max(any_counts_bound(work, ranks), int(least.max(initial=0)))


def _heaviest(work: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the (blocks + 1,) cumulative work by descending work, starting with 0."""
    return np.concatenate([[0], np.cumsum(work[order])])


def any_counts_bound(work: np.ndarray, ranks: int) -> int:
    """Return a lower bound of the largest work of a rank, for any counts."""
    return max(-(-int(work.sum()) // ranks), int(work.max())) if len(work) else 0
