"""Compiled search for equal counts of blocks with balanced work: LPT of equal cardinality, then
exchanges.

Each step relieves the most loaded rank by the first of these moves that helps:

1. exchange one of its blocks for a lighter block of another rank;
2. exchange two of its blocks for two blocks of another rank;
3. a chain: exchange one block for a lighter one of a second rank, which passes its excess to a
   third rank by another such exchange.

The search ends when the largest load is at the target, no exchange helps, or the budget is spent.
The budget counts comparisons instead of seconds, so that ranks that plan independently get the same
result.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Pairs are formed from this many blocks of a rank, spread from heaviest to lightest: 276 pairs.
PAIRED = 24
# One integer holds the sum of a pair and, in its low bits, the number of the pair.
PAIR_BITS = 9
MAX_WORK = 1 << (62 - PAIR_BITS)
"""The total work must be below this, so that sums do not overflow."""


@njit(cache=True)
def lpt_equal_counts(work, order, ranks, pinned):
    """Assign blocks in the given order, each to the least loaded rank that has room. Every rank
    gets ``n // ranks`` of the n blocks, and ``n % ranks`` of the ranks get one more.

    Args:
        work: (n,) int64.
        order: (n,) int64, blocks by descending work.
        pinned: a block that goes to rank 0, which then is among the ranks with one more; or -1.

    Returns:
        members (ranks, n // ranks + 1) int64, the blocks of every rank by descending work, without
        the pinned one; counts (ranks,), the number of members; loads (ranks,), the work including
        the pinned block.
    """
    base, extra = order.shape[0] // ranks, order.shape[0] % ranks
    members = np.empty((ranks, base + 1), np.int64)
    counts, loads = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    limits = np.full(ranks, base)
    heap = np.arange(1, ranks + 1)  # by load; rank 0 is last because only it can have work already
    heap[ranks - 1] = 0
    if pinned >= 0:
        loads[0] = work[pinned]
        if extra:
            extra -= 1
        else:
            limits[0] -= 1
    size = ranks
    for block in order:
        if block == pinned:
            continue
        while True:
            g = heap[0]
            if counts[g] == limits[g] and extra and limits[g] == base and not (
                g == 0 and pinned >= 0
            ):
                limits[g] += 1
                extra -= 1
            if counts[g] < limits[g]:
                break
            size -= 1
            heap[0] = heap[size]
            sift_down(heap, size, loads)
        members[g, counts[g]] = block
        counts[g] += 1
        loads[g] += work[block]
        sift_down(heap, size, loads)
    return members, counts, loads


@njit(cache=True, inline="always")
def sift_down(heap, size, loads):
    """Restore the heap of the first ``size`` ranks by load after the load of its top has grown."""
    top, i = heap[0], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and loads[heap[child + 1]] < loads[heap[child]]:
            child += 1
        if loads[heap[child]] >= loads[top]:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = top


@njit(cache=True)
def ranks_of(members, counts, blocks):
    """Return the (blocks,) int64 rank of every block, from (ranks, most) members and (ranks,)
    counts; 0 for the pinned block, which is not a member."""
    rank_of = np.zeros(blocks, np.int64)
    for rank in range(counts.shape[0]):
        for i in range(counts[rank]):
            rank_of[members[rank, i]] = rank
    return rank_of


@njit(cache=True)
def exchange(work, members, counts, loads, target, budget):
    """Lower the largest load by exchanges, in place, until it is at the target. Return the
    remaining comparisons, negative if the budget ended the search.

    Args:
        work: (n,) int64.
        members, counts, loads: results of :func:`lpt_equal_counts`, updated in place.
        target: largest load that is good enough.
        budget: number of comparisons to spend.
    """
    ranks = loads.shape[0]
    first_pairs = np.empty(PAIRED * (PAIRED - 1) // 2, np.int64)
    second_pairs = np.empty(PAIRED * (PAIRED - 1) // 2, np.int64)
    while budget >= 0:
        heavy = np.argmax(loads)
        if loads[heavy] <= target:
            break
        lightest = np.argmin(loads)
        # No exchange of two ranks gets both below the middle, so a result close to it is accepted
        # without looking at the other ranks.
        middle = (loads[heavy] + loads[lightest] + 1) // 2
        enough = max(target, middle + (loads[heavy] - middle) // 8)

        best, peer, i, j = loads[heavy], -1, 0, 0
        for k in range(ranks):
            p = (lightest + k) % ranks
            gap = loads[heavy] - loads[p]
            if gap < 2:
                continue
            d, a, b = _one_for_one(work, members[heavy], counts[heavy], members[p], counts[p], gap)
            budget -= counts[heavy] + counts[p]
            larger = max(loads[heavy] - d, loads[p] + d)
            if larger < best:
                best, peer, i, j = larger, p, a, b
                if best <= enough:
                    break
        if peer >= 0:
            _swap(work, members, counts, loads, heavy, i, peer, j)
            continue

        n = _pairs(work, members[heavy], counts[heavy], first_pairs)
        for k in range(ranks):
            p = (lightest + k) % ranks
            gap = loads[heavy] - loads[p]
            if gap < 2:
                continue
            m = _pairs(work, members[p], counts[p], second_pairs)
            d, a, b = _pair_for_pair(first_pairs, n, second_pairs, m, gap)
            budget -= n + 4 * m  # sorting the pairs also costs time
            larger = max(loads[heavy] - d, loads[p] + d)
            if larger < best:
                best, peer, i, j = larger, p, a, b
                if best <= enough:
                    break
        if peer >= 0:
            _swap_pairs(work, members, counts, loads, heavy, i, peer, j)
            continue

        spent, helped = _pass_on(work, members, counts, loads, heavy, target, budget)
        budget -= spent
        if not helped:
            break
    return budget


@njit(cache=True, inline="always")
def _one_for_one(work, a, a_count, b, b_count, gap):
    """Return the exchange of a block of ``a`` for one of ``b``, in descending order of work, that
    moves closest to half of ``gap``, the difference of the loads: the work moved (above 0 and below
    ``gap``, or 0 if there is no exchange) and the two positions."""
    best, moved, best_i, best_j = gap, np.int64(0), 0, 0
    i, j = 0, 0
    while i < a_count and j < b_count:
        d = work[a[i]] - work[b[j]]
        if 2 * d >= gap:
            if d < best:
                best, moved, best_i, best_j = d, d, i, j
            i += 1
        else:
            if gap - d < best:
                best, moved, best_i, best_j = gap - d, d, i, j
            j += 1
    return moved, best_i, best_j


@njit(cache=True)
def _place(work, row, count, i):
    """Move entry i of a row that is otherwise in descending order to its sorted position."""
    block = row[i]
    while i and work[row[i - 1]] < work[block]:
        row[i] = row[i - 1]
        i -= 1
    while i + 1 < count and work[row[i + 1]] > work[block]:
        row[i] = row[i + 1]
        i += 1
    row[i] = block


@njit(cache=True)
def _swap(work, members, counts, loads, p, i, q, j):
    """Exchange entry i of rank p for entry j of rank q."""
    a, b = members[p, i], members[q, j]
    members[p, i], members[q, j] = b, a
    loads[p] += work[b] - work[a]
    loads[q] += work[a] - work[b]
    _place(work, members[p], counts[p], i)
    _place(work, members[q], counts[q], j)


@njit(cache=True, inline="always")
def _picked(count, i):
    """Return the position in the row of pick i."""
    return i if count <= PAIRED else i * count // PAIRED


@njit(cache=True)
def _pairs(work, row, count, pairs):
    """Compute the ascending sums of all pairs of picks and return their number. The low bits of a
    sum identify the pair."""
    picks, n = min(count, PAIRED), 0
    for i in range(picks):
        for j in range(i + 1, picks):
            total = work[row[_picked(count, i)]] + work[row[_picked(count, j)]]
            pairs[n] = total << PAIR_BITS | n
            n += 1
    pairs[:n].sort()
    return n


@njit(cache=True)
def _pair(count, number):
    """Return the positions in the row of the two blocks of a pair."""
    picks, i = min(count, PAIRED), 0
    while number >= picks - 1 - i:
        number -= picks - 1 - i
        i += 1
    return _picked(count, i), _picked(count, i + 1 + number)


@njit(cache=True)
def _pair_for_pair(a, a_count, b, b_count, gap):
    """Do the same as :func:`_one_for_one` for pairs; the positions are pair numbers."""
    best, moved, best_i, best_j = gap, np.int64(0), 0, 0
    i, j = 0, 0
    while i < a_count and j < b_count:
        d = (a[i] >> PAIR_BITS) - (b[j] >> PAIR_BITS)
        if 2 * d >= gap:
            if d < best:
                best, moved, best_i, best_j = d, d, i, j
            j += 1
        else:
            if gap - d < best:
                best, moved, best_i, best_j = gap - d, d, i, j
            i += 1
    low = (1 << PAIR_BITS) - 1
    return moved, a[best_i] & low, b[best_j] & low


@njit(cache=True)
def _swap_pairs(work, members, counts, loads, p, p_pair, q, q_pair):
    i, j = _pair(counts[p], p_pair), _pair(counts[q], q_pair)
    for k in range(2):
        a, b = members[p, i[k]], members[q, j[k]]
        members[p, i[k]], members[q, j[k]] = b, a
        loads[p] += work[b] - work[a]
        loads[q] += work[a] - work[b]
    for rank in (p, q):
        row = members[rank]
        for i in range(1, counts[rank]):
            _place(work, row, i + 1, i)


@njit(cache=True)
def _pass_on(work, members, counts, loads, heavy, target, budget):
    """Apply the best chain of two exchanges that starts at rank ``heavy``; return the comparisons
    spent, and whether a chain was found."""
    ranks = loads.shape[0]
    best = loads[heavy]
    p1, i1, j1, p2, i2, j2 = -1, 0, 0, 0, 0, 0
    row = np.empty(members.shape[1], np.int64)
    spent = 0
    for p in range(ranks):
        if p == heavy:
            continue
        count = counts[p]
        for i in range(counts[heavy]):
            block = members[heavy, i]
            if i and work[block] == work[members[heavy, i - 1]]:
                continue
            for j in range(count):
                received = members[p, j]
                d = work[block] - work[received]
                if d <= 0 or (j and work[received] == work[members[p, j - 1]]):
                    continue
                # Row of rank p after the exchange of ``received`` for ``block``.
                row[:count] = members[p, :count]
                row[j] = block
                _place(work, row, count, j)
                load = loads[p] + d
                for q in range(ranks):
                    gap = load - loads[q]
                    # The larger load of the two cannot get below their mean.
                    if q == p or q == heavy or load - gap // 2 >= best:
                        continue
                    e, a, b = _one_for_one(work, row, count, members[q], counts[q], gap)
                    spent += count + counts[q]
                    larger = max(loads[heavy] - d, load - e, loads[q] + e)
                    if larger < best:
                        best, p1, i1, j1, p2, i2, j2 = larger, p, i, j, q, a, b
                if best <= target or spent > budget:
                    break
            if best <= target or spent > budget:
                break
        if best <= target or spent > budget:
            break
    if p1 < 0:
        return spent, False
    _swap(work, members, counts, loads, heavy, i1, p1, j1)
    _swap(work, members, counts, loads, p1, i2, p2, j2)
    return spent, True
