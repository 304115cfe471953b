"""Uneven counts of blocks, for sequences where equal counts make one rank slow.

A few blocks may see far more keys than all others: the last block of
``raymm.kernels.mask.patterns.causal_blockwise``, or tokens that see everything. With equal counts,
a rank with such a block always has more attention work than the others. But attention is only a
part of a rank's time, so that rank gets fewer of the other blocks, and the other ranks get more: so
few more that memory hardly changes.
"""

from __future__ import annotations

import numpy as np

from raymm.scheduler.context_parallel.equal_counts import any_counts_bound, balanced

MORE_BLOCKS = 1
"""Blocks that a rank may have above the largest equal count. More than one gains next to nothing,
because many ranks share the blocks that a rank gives up (``python -m benchmarks.token_time``)."""
LEAST_GAIN = 0.02
"""Uneven counts are used only if they lower the largest cost by at least this fraction, because
shapes then differ between ranks."""


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
