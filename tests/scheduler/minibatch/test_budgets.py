"""The bound on groups equals brute force; budgets are filled by samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.minibatch.budgets import least_groups, suggest_budgets
from raymm.scheduler.minibatch.problem import SampleSizes
from tests.support.minibatch_data import real, sizes


def fewest(rows: list[tuple[int, ...]], budgets: tuple[int, ...]) -> int:
    """Return the fewest groups by trying every group for every sample."""
    best = len(rows)

    def search(at: int, loads: list[list[int]]) -> None:
        nonlocal best
        if len(loads) >= best and at < len(rows):
            return
        if at == len(rows):
            best = min(best, len(loads))
            return
        for load in [*loads, None]:
            opened = load is None
            load = [0] * len(budgets) if load is None else load
            after = [a + b for a, b in zip(load, rows[at], strict=True)]
            if all(map(int.__le__, after, budgets)):
                search(at + 1, [other for other in loads if other is not load] + [after])
            if opened:
                return

    search(0, [])
    return best


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=7),
       st.integers(12, 20), st.integers(12, 20))
def test_no_partition_has_fewer_groups_than_the_bound(rows, first, second) -> None:
    of = SampleSizes(("a", "b"), np.array(rows))
    bound = least_groups(of, (first, second))
    assert bound <= max(1, fewest(rows, (first, second)))
    for column, budget in enumerate((first, second)):
        assert bound >= -(-sum(row[column] for row in rows) // budget)


def test_the_bound_covers_incompatible_samples() -> None:
    of = SampleSizes(("a",), np.array([[6], [6], [6], [5], [5], [3]]))
    # 31 units fill four groups of 10, but each six needs its own, and the fives one.
    assert least_groups(of, (10,)) == 4
    assert least_groups(SampleSizes(("a",), np.array([[6]] * 9)), (10,)) == 9


@given(sizes(), st.floats(1, 8))
def test_suggested_budgets_hold_every_sample(of: SampleSizes, samples_per_group: float) -> None:
    budgets = suggest_budgets(of, samples_per_group)
    assert all(budget >= 1 for budget in budgets)
    assert (of.values <= budgets).all()


@pytest.mark.parametrize("samples_per_group", [3, 4, 6])
def test_suggested_budgets_follow_the_commonest_size(samples_per_group) -> None:
    # ChartQA has images of 5 tiles, nine out of ten.
    tiles, tokens = suggest_budgets(real("chartqa"), samples_per_group)
    assert tiles == 5 * samples_per_group
    totals = real("chartqa").totals
    assert tokens / tiles == pytest.approx(1.04 * totals[1] / totals[0], rel=0.01)


def test_no_budgets_are_suggested_without_samples() -> None:
    with pytest.raises(PlanError, match="and 0 samples"):
        suggest_budgets(SampleSizes(("a",), np.zeros((0, 1), int)))
