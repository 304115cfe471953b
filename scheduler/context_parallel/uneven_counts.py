"""Counts of blocks that differ, where equal ones make a rank slow.

Where a few blocks see far more than all others (the last block of
``raymm.kernels.mask.patterns.causal_blockwise``, tokens that see everything), whoever has one has
more attention than the others, however equal counts are dealt out. But attention is only a part of
its time. So it gets fewer of the other blocks, and the others get more: as few more that memory
hardly differs.
"""

from __future__ import annotations

import numpy as np

from raymm.scheduler.context_parallel.equal_counts import any_counts_bound, balanced

MORE_BLOCKS = 1
"""A rank has at most so many more than with equal counts. More than one gains next to nothing, as
those who take over a rank's blocks are many (``python -m benchmarks.token_time``)."""
LEAST_GAIN = 0.02
"""Of the largest cost; what counts that differ save is to be worth that shapes differ."""


def most_blocks(blocks: int, ranks: int) -> int:
    """How many blocks a rank has at most, where counts may differ.

    Args:
        blocks: of the sequence.
        ranks: that share it.
    """
    return -(-blocks // ranks) + MORE_BLOCKS


def relieve(costs: np.ndarray, ranks: int, rank_of: np.ndarray) -> tuple[np.ndarray, int]:
    """Give up equal counts if that makes the largest cost less by :data:`LEAST_GAIN`.

    Args:
        costs: (blocks,) int64, of every block all that it costs: attention and the rest.
        ranks: how many share them.
        rank_of: (blocks,) the rank of every block, counts being equal.

    Returns:
        The rank of every block, and a largest cost that no distribution with up to
        :func:`most_blocks` gets below.
    """
    bound = any_counts_bound(costs, ranks)
    enough = (1 - LEAST_GAIN) * _largest(costs, ranks, rank_of)
    if enough <= bound:
        return rank_of, bound
    # At most so many blocks are equally many blocks and places that stay empty.
    places = np.zeros(most_blocks(len(costs), ranks) * ranks, dtype=np.int64)
    places[: len(costs)] = costs
    filled, bound = balanced(places, ranks, -1, 0)
    uneven = filled[: len(costs)]
    return (uneven if _largest(costs, ranks, uneven) <= enough else rank_of), bound


def _largest(costs: np.ndarray, ranks: int, rank_of: np.ndarray) -> int:
    loads = np.zeros(ranks, dtype=np.int64)
    np.add.at(loads, rank_of, costs)
    return int(loads.max())
