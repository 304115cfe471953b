"""Split of a sequence's blocks of tokens over the ranks of a context-parallel group.

Attention work differs between blocks (:mod:`raymm.scheduler.context_parallel.workload`); all other
work of a layer costs the same for every token. ``balanced``, the default, gives every rank equally
many tokens *and* equal attention work. Cornstarch's LPT (v2 §3.2.1) balances attention only and can
leave one rank with many more tokens than another. If equal counts leave one rank with too much work
in total, counts may differ by a block or two
(:mod:`raymm.scheduler.context_parallel.uneven_counts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.context_parallel import swaps as token_swaps
from raymm.scheduler.context_parallel.equal_counts import Policy, any_counts_bound, balanced
from raymm.scheduler.context_parallel.uneven_counts import relieve
from raymm.scheduler.context_parallel.workload import DEFAULT_BLOCK


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
    def cost_imbalance(self) -> float:
        """Largest cost divided by the mean: time of the slowest rank relative to the mean."""
        costs = self.costs
        return max(costs) * self.ranks / sum(costs) if any(costs) else 1.0

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
