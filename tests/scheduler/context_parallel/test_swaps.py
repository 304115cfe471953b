"""The compiled search for equal counts: its start, its exchanges and its budget."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from raymm.scheduler.context_parallel import swaps as token_swaps
from tests.scheduler.context_parallel.test_distribution import WORK


@given(WORK, st.integers(1, 9), st.booleans())
def test_lpt_of_equal_counts_fills_the_least_loaded_rank(work, ranks: int, pin) -> None:
    """Replay block by block, with a search over all ranks."""
    work = np.array(work)
    order = np.argsort(-work, kind="stable")
    pinned = len(work) - 1 if pin else -1
    members, counts, loads = token_swaps.lpt_equal_counts(work, order, ranks, pinned)
    where = {int(b): g for g in range(ranks) for b in members[g, : counts[g]]}
    base, extra = divmod(len(work), ranks)
    load, count, longer = [0] * ranks, [0] * ranks, 0
    if pin:
        load[0], count[0], longer = int(work[pinned]), 1, min(extra, 1)
    for b in order.tolist():
        if b == pinned:
            continue
        # Rank 0's longer list is already counted when the pinned block makes it longer.
        limit = [base + (pin and g == 0 and extra > 0) for g in range(ranks)]
        may = [
            g for g in range(ranks)
            if count[g] < limit[g]
            or (count[g] == base and longer < extra and not (pin and g == 0))
        ]
        g = where[b]
        assert g in may and load[g] == min(load[r] for r in may)
        longer += count[g] == base and not (pin and g == 0)
        load[g] += int(work[b])
        count[g] += 1
    assert load == loads.tolist()
    assert max(count) - min(count) <= 1
    assert not (pin and extra) or count[0] == base + 1


def relieves(work, rows: list[list[int]], heavy: int) -> bool:
    """Return True if an exchange of one or two blocks, or a chain of two exchanges, helps.

    It must lower the load of rank ``heavy`` and keep the affected ranks below it. Tries all.
    """

    def load(row) -> int:
        return sum(int(work[b]) for b in row)

    def exchanges(a, b, size: int):
        for x in itertools.combinations(a, size):
            for y in itertools.combinations(b, size):
                yield [*(set(a) - set(x)), *y], [*(set(b) - set(y)), *x]

    limit = load(rows[heavy])
    for p in range(len(rows)):
        if p == heavy:
            continue
        for size in (1, 2):
            for mine, other in exchanges(rows[heavy], rows[p], size):
                if max(load(mine), load(other)) < limit:
                    return True
        for mine, second in exchanges(rows[heavy], rows[p], 1):
            if load(mine) >= limit:
                continue
            for q in range(len(rows)):
                if q not in (heavy, p) and any(
                    max(load(second_after), load(third)) < limit
                    for second_after, third in exchanges(second, rows[q], 1)
                ):
                    return True
    return False


@given(st.lists(st.integers(0, 100), min_size=6, max_size=14), st.integers(2, 4))
# Only a chain helps in these cases.
@example([5, 1, 1, 6, 0, 7, 8, 1, 6, 3, 8, 9, 5], 4)
@example([44, 29, 17, 27, 72, 36, 99, 57, 66, 52, 79, 35], 4)
@example([0, 6, 1, 0, 9, 8, 3, 9, 5, 0, 6, 1], 3)
def test_exchanges_end_when_none_helps(work, ranks: int) -> None:
    work = np.array(work)
    order = np.argsort(-work, kind="stable")
    members, counts, loads = token_swaps.lpt_equal_counts(work, order, ranks, -1)
    assert token_swaps.exchange(work, members, counts, loads, 0, 10**9) >= 0
    rows = [members[g, : counts[g]].tolist() for g in range(ranks)]
    assert sorted(itertools.chain(*rows)) == list(range(len(work)))
    assert loads.tolist() == [work[row].sum() for row in rows]
    assert not relieves(work, rows, int(loads.argmax()))


def test_a_small_budget_ends_the_search() -> None:
    work = np.random.default_rng(0).integers(1, 10**9, 512)
    order = np.argsort(-work, kind="stable")
    largest = []
    for budget in (-1, 1000, 10**9):
        state = token_swaps.lpt_equal_counts(work, order, 64, -1)
        left = token_swaps.exchange(work, *state, 0, budget)
        assert (left < 0) == (budget < 10**9)
        largest.append(state[2].max())
    assert largest[0] > largest[1] > largest[2]
