"""Which rank of a context-parallel group gets which blocks of a sequence's tokens.

Attention work per block differs (:mod:`raymm.scheduler.context_parallel.workload`), everything
else a layer does costs the same for every token. ``balanced``, the default, gives every rank
equally many tokens *and* equal attention work; Cornstarch's LPT (v2 §3.2.1) looks at attention
alone and can leave one rank with many more tokens than another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raymm.scheduler.context_parallel import swaps as token_swaps
from raymm.scheduler.context_parallel.error import ContextParallelError
from raymm.scheduler.context_parallel.workload import DEFAULT_BLOCK

# ``balanced`` is content this near to its lower bound,
TOLERANCE = 5e-5
# and stops after this many comparisons, about a millisecond.
BUDGET = 300_000


Policy = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, int]]
"""From (work, ranks, pinned, seed) to the (blocks,) rank of every block and a lower bound of the
largest work of a rank: ``work`` is (blocks,) integers in any unit, ``pinned`` the block that must
lie where there is one block more (-1 for none), ``seed`` that of what is random."""


@dataclass(frozen=True)
class TokenDistribution:
    """Blocks of one sequence split to ranks.

    Attributes:
        policy: which policy made it.
        n_tokens: tokens of the sequence.
        block: tokens per block; the last block may have fewer.
        blocks: block numbers of every rank, ascending, so that a rank's tokens keep their
            order.
        work: work of every rank, in the unit of the work that was given.
        tokens: tokens of every rank.
        bound: no distribution (for ``balanced``: with equal counts) has a largest work below this.
        status: ``optimal`` if the largest work is at the bound, else ``heuristic``: nothing is
            proven.
    """

    policy: str
    n_tokens: int
    block: int
    blocks: tuple[tuple[int, ...], ...]
    work: tuple[int, ...]
    tokens: tuple[int, ...]
    bound: int
    status: str

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.blocks)

    @property
    def imbalance(self) -> float:
        """Largest work over mean work; 1 is perfect."""
        return max(self.work) * self.ranks / sum(self.work) if any(self.work) else 1.0

    @property
    def gap(self) -> float:
        """How far the largest work is above the bound, relative to it."""
        return max(self.work) / self.bound - 1.0 if self.bound else 0.0

    @property
    def token_imbalance(self) -> float:
        """Largest number of tokens over mean; what MLPs and norms feel."""
        return max(self.tokens) * self.ranks / self.n_tokens if self.n_tokens else 1.0

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Tokens of a rank as ascending [start, stop) ranges, neighbouring blocks joined."""
        result: list[tuple[int, int]] = []
        for number in self.blocks[rank]:
            start, stop = number * self.block, min((number + 1) * self.block, self.n_tokens)
            if result and result[-1][1] == start:
                start = result.pop()[0]
            result.append((start, stop))
        return tuple(result)


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
    return token_swaps.ranks_of(members, counts, len(work)), bound


def distribute(
    work: np.ndarray,
    ranks: int,
    policy: Policy = balanced,
    *,
    n_tokens: int | None = None,
    block: int = DEFAULT_BLOCK,
    seed: int = 0,
) -> TokenDistribution:
    """Split blocks over ranks.

    Args:
        work: (blocks,) integers, work per block in any unit.
        ranks: size of the context-parallel group.
        policy: who gets what; others than the default are in
            :mod:`raymm.scheduler.baselines.token_policies`.
        n_tokens: tokens of the sequence. Default: every block is full.
        block: tokens per block.
        seed: of policies that draw.

    Raises:
        ContextParallelError: ranks or block below what is accepted;
            work that is negative, not integers, not one per block, or so large that sums
            overflow.
    """
    work = _checked_work(work)
    if ranks < 1:
        raise ContextParallelError(f"ranks must be at least 1, got {ranks}")
    if block < 1:
        raise ContextParallelError(f"block must be at least 1, got {block}")
    n_tokens = len(work) * block if n_tokens is None else n_tokens
    if -(-n_tokens // block) != len(work) or n_tokens < 0:
        raise ContextParallelError(
            f"n_tokens = {n_tokens} makes {-(-n_tokens // block)} blocks of {block} tokens, "
            f"work has {len(work)}"
        )
    last = len(work) - 1 if n_tokens % block else -1
    # A shorter last block may make up for a whole one only where that rank has one more.
    pinned = last if len(work) % ranks else -1
    rank_of, bound = policy(work, ranks, pinned, seed)
    return _result(policy.__name__, work, ranks, n_tokens, block, rank_of, bound)


def _checked_work(work: np.ndarray) -> np.ndarray:
    work = np.asarray(work)
    if work.ndim != 1 or (work.dtype.kind not in "iu" and len(work)):
        raise ContextParallelError(
            f"work must be integers, one per block, got {work.dtype} of shape {work.shape}"
        )
    work = np.ascontiguousarray(work, dtype=np.int64)
    if len(work) and work.min() < 0:
        at = int(work.argmin())
        raise ContextParallelError(f"work must not be negative, got {work[at]} for block {at}")
    if len(work) and float(work.sum(dtype=np.float64)) >= token_swaps.MAX_WORK:
        raise ContextParallelError(
            f"the sum of work must be below {token_swaps.MAX_WORK}, got about "
            f"{work.sum(dtype=np.float64):.3g}"
        )
    return work


def _result(
    policy: str, work: np.ndarray, ranks: int, n_tokens: int, block: int,
    rank_of: np.ndarray, bound: int,
) -> TokenDistribution:
    counts = np.bincount(rank_of, minlength=ranks)
    tokens = counts * block
    if len(work):
        tokens[rank_of[-1]] -= len(work) * block - n_tokens
    # Stable, so every rank's blocks ascend; 16 bits are sorted digit by digit.
    small = np.uint16 if ranks <= 1 << 16 else np.int64
    order = np.argsort(rank_of.astype(small), kind="stable")
    before = np.concatenate([[0], np.cumsum(work[order])])
    stops = np.cumsum(counts)
    loads = before[stops] - before[stops - counts]
    numbers, edges = order.tolist(), [0, *stops.tolist()]
    blocks = tuple(tuple(numbers[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    return TokenDistribution(
        policy=policy,
        n_tokens=int(n_tokens),
        block=int(block),
        blocks=blocks,
        work=tuple(loads.tolist()),
        tokens=tuple(tokens.tolist()),
        bound=bound,
        status="optimal" if loads.max() <= bound else "heuristic",
    )


def descending(work: np.ndarray) -> np.ndarray:
    """Blocks by descending work, of equal work by position."""
    if not len(work):
        return np.zeros(0, dtype=np.int64)
    below = work.max() - work
    return np.argsort(below.astype(np.uint16) if below.max() < 1 << 16 else below, kind="stable")


def _equal_counts_bound(work: np.ndarray, order: np.ndarray, ranks: int) -> int:
    """A largest work that no distribution with counts equal to within one gets below.

    For every k some rank has k + 1 of the k * ranks + 1 heaviest blocks, and beside them as
    many others as make up its count: at least the lightest of both kinds.
    """
    before = np.concatenate([[0], np.cumsum(work[order])])
    heavy = np.arange(0, len(work), ranks)  # k * ranks
    k = np.arange(len(heavy))
    lightest = len(work) - np.maximum(len(work) // ranks - 1 - k, 0)
    least = before[heavy + 1] - before[heavy - k] + before[-1] - before[lightest]
    return max(any_counts_bound(work, ranks), int(least.max(initial=0)))


def any_counts_bound(work: np.ndarray, ranks: int) -> int:
    """A largest work that no distribution gets below."""
    return max(-(-int(work.sum()) // ranks), int(work.max())) if len(work) else 0
