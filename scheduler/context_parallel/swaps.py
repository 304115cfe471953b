"""Equal counts of blocks with balanced work, compiled: LPT of equal cardinality, then exchanges.

The most loaded rank is relieved over and over, by the first of these that can:

1. one of its blocks for a lighter one of another rank;
2. two of its blocks for two of another rank;
3. a chain: one for a lighter one of a second rank, which passes what is too much for it on to a
   third by another such exchange.

It ends when the largest load is at the target, no exchange helps, or the budget is spent. The
budget counts comparisons, not seconds, so that every rank that plans for itself plans the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Pairs are made of this many of a rank's blocks, spread from heaviest to lightest: 276 pairs.
PAIRED = 24
# A pair's sum and its number among the rank's pairs share one integer.
PAIR_BITS = 9
MAX_WORK = 1 << (62 - PAIR_BITS)
"""The sum of all work must stay below this, so that sums do not overflow."""


@njit(cache=True)
def lpt_equal_counts(work, order, ranks, pinned):
    """Blocks in the given order, each to the least loaded rank that may still take one.

    Of n blocks every rank gets n // ranks, and n % ranks of them one more.

    Args:
        work: (n,) int64.
        order: (n,) int64, blocks by descending work.
        ranks: how many.
        pinned: a block that goes to rank 0, which then has one block more if any has; or -1.

    Returns:
        members (ranks, n // ranks + 1) int64, the blocks of every rank by descending work,
        without the pinned one; counts (ranks,), how many these are; loads (ranks,), their work
        and the pinned one's.
    """
    base, extra = order.shape[0] // ranks, order.shape[0] % ranks
    members = np.empty((ranks, base + 1), np.int64)
    counts, loads = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    limits = np.full(ranks, base)
    heap = np.arange(1, ranks + 1)  # by load; rank 0 last, as only it can have work by now
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
            _sift_down(heap, size, loads)
        members[g, counts[g]] = block
        counts[g] += 1
        loads[g] += work[block]
        _sift_down(heap, size, loads)
    return members, counts, loads


@njit(cache=True, inline="always")
def _sift_down(heap, size, loads):
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
    """(blocks,) int64, the rank of every block; 0 for the pinned one, which is no member.

    Args:
        members: (ranks, most) int64, blocks of every rank.
        counts: (ranks,) int64, how many each has.
        blocks: how many there are.
    """
    rank_of = np.zeros(blocks, np.int64)
    for rank in range(counts.shape[0]):
        for i in range(counts[rank]):
            rank_of[members[rank, i]] = rank
    return rank_of


@njit(cache=True)
def exchange(work, members, counts, loads, target, budget):
    """Lower the largest load by exchanges, in place, until it is at the target.

    Args:
        work: (n,) int64.
        members, counts, loads: what :func:`lpt_equal_counts` returns.
        target: a largest load that is good enough.
        budget: comparisons to spend.

    Returns:
        Comparisons left, below 0 if the budget ended the search.
    """
    ranks = loads.shape[0]
    first_pairs = np.empty(PAIRED * (PAIRED - 1) // 2, np.int64)
    second_pairs = np.empty(PAIRED * (PAIRED - 1) // 2, np.int64)
    while budget >= 0:
        heavy = np.argmax(loads)
        if loads[heavy] <= target:
            break
        lightest = np.argmin(loads)
        # No exchange of two ranks gets both below this; what comes near needs no rival.
        middle = (loads[heavy] + loads[lightest] + 1) // 2
        enough = max(target, middle + (loads[heavy] - middle) // 8)

        best, other, i, j = loads[heavy], -1, 0, 0
        for k in range(ranks):
            p = (lightest + k) % ranks
            gap = loads[heavy] - loads[p]
            if gap < 2:
                continue
            d, a, b = _one_for_one(work, members[heavy], counts[heavy], members[p], counts[p], gap)
            budget -= counts[heavy] + counts[p]
            larger = max(loads[heavy] - d, loads[p] + d)
            if larger < best:
                best, other, i, j = larger, p, a, b
                if best <= enough:
                    break
        if other >= 0:
            _swap(work, members, counts, loads, heavy, i, other, j)
            continue

        n = _pairs(work, members[heavy], counts[heavy], first_pairs)
        for k in range(ranks):
            p = (lightest + k) % ranks
            gap = loads[heavy] - loads[p]
            if gap < 2:
                continue
            m = _pairs(work, members[p], counts[p], second_pairs)
            d, a, b = _pair_for_pair(first_pairs, n, second_pairs, m, gap)
            budget -= n + 4 * m  # which also had to be sorted
            larger = max(loads[heavy] - d, loads[p] + d)
            if larger < best:
                best, other, i, j = larger, p, a, b
                if best <= enough:
                    break
        if other >= 0:
            _swap_pairs(work, members, counts, loads, heavy, i, other, j)
            continue

        spent, helped = _pass_on(work, members, counts, loads, heavy, target, budget)
        budget -= spent
        if not helped:
            break
    return budget


@njit(cache=True, inline="always")
def _one_for_one(work, a, a_count, b, b_count, gap):
    """The exchange of a block of ``a`` for one of ``b`` that moves nearest to half of ``gap``,
    the difference of their loads.

    Both by descending work. Returns the work moved, above 0 and below gap, and the places; 0
    if there is none.
    """
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
    """Move entry i of a row that is otherwise in descending order to where it belongs."""
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
    """Place in the row of pick i."""
    return i if count <= PAIRED else i * count // PAIRED


@njit(cache=True)
def _pairs(work, row, count, pairs):
    """Sums of two picks, ascending; the low bits say which two. Returns how many."""
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
    """Places in the row of a pair's two blocks."""
    picks, i = min(count, PAIRED), 0
    while number >= picks - 1 - i:
        number -= picks - 1 - i
        i += 1
    return _picked(count, i), _picked(count, i + 1 + number)


@njit(cache=True)
def _pair_for_pair(a, a_count, b, b_count, gap):
    """As :func:`_one_for_one` for pairs; the places are pair numbers."""
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
    """Make the best chain of two exchanges that starts at rank ``heavy``.

    Returns:
        Comparisons spent, and whether a chain was found.
    """
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
                taken = members[p, j]
                d = work[block] - work[taken]
                if d <= 0 or (j and work[taken] == work[members[p, j - 1]]):
                    continue
                # Rank p with the given block in place of the taken one.
                row[:count] = members[p, :count]
                row[j] = block
                _place(work, row, count, j)
                load = loads[p] + d
                for q in range(ranks):
                    gap = load - loads[q]
                    # The two can end no lower than in the middle.
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


@njit(cache=True)
def lpt(work, order, ranks):
    """Blocks in the given order, each to the least loaded rank (Graham 1969).

    Args:
        work: (n,) int64.
        order: (n,) int64.
        ranks: how many.

    Returns:
        (n,) int64, the rank of every block.
    """
    rank_of = np.empty(order.shape[0], np.int64)
    heap, loads = np.arange(ranks), np.zeros(ranks, np.int64)
    for block in order:
        rank_of[block] = heap[0]
        loads[heap[0]] += work[block]
        _sift_down(heap, ranks, loads)
    return rank_of
