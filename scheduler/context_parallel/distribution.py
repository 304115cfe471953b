"""Split of a sequence's blocks of tokens over the ranks of a context-parallel group.

Attention work differs between blocks (:mod:`raymm.scheduler.context_parallel.workload`); all other
work of a layer costs the same for every token. ``balanced``, the default, gives every rank equally
many tokens *and* equal attention work. Cornstarch's LPT (v2 §3.2.1) balances attention only and can
leave one rank with many more tokens than another. If equal counts leave one rank with too much work
in total (the last block of ``raymm.kernels.mask.patterns.causal_blockwise``, tokens that see
everything), counts may differ by a block or two (:func:`relieve`), and memory hardly changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from raymm.errors import PlanError
from raymm.scheduler.context_parallel import swaps as token_swaps
from raymm.scheduler.context_parallel.workload import DEFAULT_BLOCK

# ``balanced`` stops within this relative distance of its lower bound,
TOLERANCE = 5e-5
# or after this many comparisons, about a millisecond.
BUDGET = 300_000
Policy = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, int]]
"""Function of (work, ranks, pinned, seed) that returns the (blocks,) rank of every block and a
lower bound of the largest work of a rank. ``work`` is (blocks,) integers in any unit. ``pinned`` is
a block that must go to a rank with one block more, or -1. ``seed`` is for random policies."""
MORE_BLOCKS = 1
"""Blocks that a rank may have above the largest equal count. More than one gains next to nothing,
because many ranks share the blocks that a rank gives up (``python -m benchmarks.token_time``)."""
LEAST_GAIN = 0.02
"""Uneven counts are used only if they lower the largest cost by at least this fraction, because
shapes then differ between ranks."""


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


@dataclass(frozen=True)
class TokenDistribution:
    """Blocks of one sequence, split over ranks.

    Attributes:
        block: tokens per block; the last block may have fewer.
        blocks: block numbers of every rank, ascending, so that a rank's tokens keep their order.
        work: attention work of every rank, in the unit of the input.
        bound: lower bound of the largest cost over all distributions (for ``balanced``: over those
            with the accepted counts).
        status: ``optimal`` if the largest cost equals the bound, else ``heuristic``.
        token_work: cost of a block besides its attention, in the unit of the work. 0 if only
            attention was balanced and counts had to be equal.
    """

    policy: str
    n_tokens: int
    block: int
    blocks: tuple[tuple[int, ...], ...]
    work: tuple[int, ...]
    tokens: tuple[int, ...]
    bound: int
    status: str
    token_work: int = 0

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    @property
    def imbalance(self) -> float:
        """Largest work divided by the mean; 1 is perfect."""
        return max(self.work) * self.ranks / sum(self.work) if any(self.work) else 1.0

    @property
    def costs(self) -> tuple[int, ...]:
        """Cost of every rank: attention and all other work of its blocks."""
        return tuple(
            work + self.token_work * len(blocks)
            for work, blocks in zip(self.work, self.blocks, strict=True)
        )

    @property
    def gap(self) -> float:
        """Distance of the largest cost from the bound, relative to the bound."""
        return max(self.costs) / self.bound - 1.0 if self.bound else 0.0

    @property
    def token_imbalance(self) -> float:
        """Largest number of tokens divided by the mean; determines the time of MLPs and norms."""
        return max(self.tokens) * self.ranks / self.n_tokens if self.n_tokens else 1.0

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the tokens of a rank as ascending [start, stop) ranges; adjacent blocks are
        joined."""
        result: list[tuple[int, int]] = []
        for number in self.blocks[rank]:
            start, stop = number * self.block, min((number + 1) * self.block, self.n_tokens)
            if result and result[-1][1] == start:
                start = result.pop()[0]
            result.append((start, stop))
        return tuple(result)


def distribute(
    work: np.ndarray,
    ranks: int,
    policy: Policy = balanced,
    *,
    n_tokens: int | None = None,
    block: int = DEFAULT_BLOCK,
    seed: int = 0,
    token_work: int = 0,
) -> TokenDistribution:
    """Split blocks over ranks.

    Args:
        work: (blocks,) integers, attention work per block in any unit.
        policy: how blocks are assigned; the policies other than the default are for benchmarks.
        n_tokens: tokens of the sequence. Default: every block is full.
        token_work: cost of a block besides its attention, in the unit of ``work``. If above 0,
            ``balanced`` may use counts that differ by a block or two where that clearly lowers the
            largest cost.

    Raises:
        PlanError: ``ranks``, ``block`` or ``token_work`` is too small, or ``work`` is negative, not
            integers, not one per block, or so large that sums overflow.
    """
    if token_work < 0:
        raise PlanError(f"token_work must be at least 0, got {token_work}")
    work = _checked_work(work, token_work)
    if ranks < 1:
        raise PlanError(f"ranks must be at least 1, got {ranks}")
    if block < 1:
        raise PlanError(f"block must be at least 1, got {block}")
    n_tokens = len(work) * block if n_tokens is None else n_tokens
    if -(-n_tokens // block) != len(work) or n_tokens < 0:
        raise PlanError(
            f"n_tokens = {n_tokens} makes {-(-n_tokens // block)} blocks of {block} tokens, "
            f"work has {len(work)}"
        )
    last = len(work) - 1 if n_tokens % block else -1
    # A short last block may go to a rank without an extra block only if counts are all equal.
    pinned = last if len(work) % ranks else -1
    rank_of, bound = policy(work, ranks, pinned, seed)
    if token_work and policy is balanced:
        rank_of, bound = relieve(work + token_work, ranks, rank_of)
    elif token_work:
        bound = any_counts_bound(work + token_work, ranks)
    counts = np.bincount(rank_of, minlength=ranks)
    tokens = counts * block
    if len(work):
        tokens[rank_of[-1]] -= len(work) * block - n_tokens
    # The stable sort keeps every rank's blocks ascending. 16-bit keys use a faster radix sort.
    small = np.uint16 if ranks <= 1 << 16 else np.int64
    order = np.argsort(rank_of.astype(small), kind="stable")
    cumulative = np.concatenate([[0], np.cumsum(work[order])])
    stops = np.cumsum(counts)
    loads = cumulative[stops] - cumulative[stops - counts]
    numbers, edges = order.tolist(), [0, *stops.tolist()]
    blocks = tuple(tuple(numbers[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    return TokenDistribution(
        policy=policy.__name__,
        n_tokens=int(n_tokens),
        block=int(block),
        blocks=blocks,
        work=tuple(loads.tolist()),
        tokens=tuple(tokens.tolist()),
        bound=bound,
        status="optimal" if (loads + token_work * counts).max() <= bound else "heuristic",
        token_work=int(token_work),
    )


def _checked_work(work: np.ndarray, token_work: int) -> np.ndarray:
    work = np.asarray(work)
    if work.ndim != 1 or (work.dtype.kind not in "iu" and len(work)):
        raise PlanError(
            f"work must be integers, one per block, got {work.dtype} of shape {work.shape}"
        )
    work = np.ascontiguousarray(work, dtype=np.int64)
    if len(work) and work.min() < 0:
        index = int(work.argmin())
        raise PlanError(f"work must not be negative, got {work[index]} for block {index}")
    total = float(work.sum(dtype=np.float64)) + float(token_work) * len(work)
    if total >= token_swaps.MAX_WORK:
        raise PlanError(
            f"the sum of work must be below {token_swaps.MAX_WORK}, got about {total:.3g}"
        )
    return work


def most_blocks(blocks: int, ranks: int) -> int:
    """Return the largest number of blocks of a rank if counts may differ."""
    return -(-blocks // ranks) + MORE_BLOCKS


def relieve(costs: np.ndarray, ranks: int, rank_of: np.ndarray) -> tuple[np.ndarray, int]:
    """Give up equal counts if that lowers the largest cost by :data:`LEAST_GAIN`. Return the rank
    of every block, and a lower bound of the largest cost for up to :func:`most_blocks` blocks per
    rank.

    Args:
        costs: (blocks,) int64, total cost of every block: attention and all other work.
        rank_of: (blocks,) rank of every block with equal counts.
    """
    bound = any_counts_bound(costs, ranks)
    enough = (1 - LEAST_GAIN) * _largest(costs, ranks, rank_of)
    if enough <= bound:
        return rank_of, bound
    # Add blocks of cost 0 as empty places, so that up to most_blocks becomes an equal count.
    padded = np.zeros(most_blocks(len(costs), ranks) * ranks, dtype=np.int64)
    padded[: len(costs)] = costs
    filled, bound = balanced(padded, ranks, -1, 0)
    uneven = filled[: len(costs)]
    return (uneven if _largest(costs, ranks, uneven) <= enough else rank_of), bound


def _largest(costs: np.ndarray, ranks: int, rank_of: np.ndarray) -> int:
    loads = np.zeros(ranks, dtype=np.int64)
    np.add.at(loads, rank_of, costs)
    return int(loads.max())
