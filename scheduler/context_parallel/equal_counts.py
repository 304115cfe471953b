"""Equal counts of blocks with equal work, and bounds of what any distribution can reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from raymm.scheduler.context_parallel import swaps as token_swaps

# ``balanced`` is content this near to its lower bound,
TOLERANCE = 5e-5
# and stops after this many comparisons, about a millisecond.
BUDGET = 300_000


Policy = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, int]]
"""From (work, ranks, pinned, seed) to the (blocks,) rank of every block and a lower bound of the
largest work of a rank: ``work`` is (blocks,) integers in any unit, ``pinned`` the block that must
lie where there is one block more (-1 for none), ``seed`` that of what is random."""


def balanced(work: np.ndarray, ranks: int, pinned: int, seed: int) -> tuple[np.ndarray, int]:
    """Equal counts and equal work: LPT of equal cardinality, then exchanges between ranks; the
    same result everywhere for the same work, within milliseconds.

    Args:
        work: (blocks,) int64, work per block.
        ranks: how many share it.
        pinned: a block that must lie where there is one block more, or -1.
        seed: not used; of policies that draw.
    """
    order = descending(work)
    members, counts, loads = token_swaps.lpt_equal_counts(work, order, ranks, pinned)
    bound = _equal_counts_bound(work, order, ranks)
    token_swaps.exchange(work, members, counts, loads, int(bound * (1 + TOLERANCE)), BUDGET)
    if len(work) and loads.max() > bound * (1 + TOLERANCE):
        bound = int(_crowded_bound(_heaviest(work, order), ranks, bound))
    return token_swaps.ranks_of(members, counts, len(work)), bound


def descending(work: np.ndarray) -> np.ndarray:
    """Blocks by descending work, of equal work by position."""
    if not len(work):
        return np.zeros(0, dtype=np.int64)
    below = work.max() - work
    return np.argsort(below.astype(np.uint16) if below.max() < 1 << 16 else below, kind="stable")


@njit(cache=True)
def _crowded_bound(before, ranks, bound):
    """A largest work that no counts equal to within one get below, where few blocks are heavy.

    Of the ``k * ranks + h`` heaviest blocks (h from 1 to ranks), ranks have k each or more: those
    that have more, g say, have ``g * k + h`` at least, so g is at most h, or one each is enough.
    Beside them they have as many others as make up their counts. What these g have, at least the
    lightest of both kinds, is g times the largest work at most; whatever g is.

    Args:
        before: (n + 1,) int64, work of the heaviest blocks.
        ranks: how many.
        bound: one that is known.
    """
    blocks = before.shape[0] - 1
    least_count = blocks // ranks
    for top in range(1, blocks + 1):
        k = (top - 1) // ranks
        h = top - k * ranks
        least = before[blocks]
        for g in range(h, 0, -1):
            heavy = g * k + h
            others = max(0, g * least_count - heavy)
            work = before[top] - before[top - heavy] + before[blocks] - before[blocks - others]
            if work <= bound * g:  # this top says nothing new; so it is with most of them
                least = bound
                break
            least = min(least, -(-work // g))
        bound = max(bound, least)
    return bound


def _equal_counts_bound(work: np.ndarray, order: np.ndarray, ranks: int) -> int:
    """A largest work that no distribution with counts equal to within one gets below.

    For every k some rank has k + 1 of the k * ranks + 1 heaviest blocks, and beside them as
    many others as make up its count: at least the lightest of both kinds.
    """
    before = _heaviest(work, order)
    heavy = np.arange(0, len(work), ranks)  # k * ranks
    k = np.arange(len(heavy))
    lightest = len(work) - np.maximum(len(work) // ranks - 1 - k, 0)
    least = before[heavy + 1] - before[heavy - k] + before[-1] - before[lightest]
    return max(any_counts_bound(work, ranks), int(least.max(initial=0)))


def _heaviest(work: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(blocks + 1,) work of the heaviest blocks: of none, of the heaviest, of all."""
    return np.concatenate([[0], np.cumsum(work[order])])


def any_counts_bound(work: np.ndarray, ranks: int) -> int:
    """A largest work that no distribution gets below."""
    return max(-(-int(work.sum()) // ranks), int(work.max())) if len(work) else 0
