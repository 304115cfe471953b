"""Sizes of samples and budgets: values that are refused, and groups of a plan."""

from __future__ import annotations

import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.scheduler.minibatch.problem import (
    MiniBatchPlan,
    SampleSizes,
    checked,
    checked_budgets,
    generator,
)

NAMES = ("vision", "text")
VALUES = np.array([[1, 5], [0, 9], [3, 2]])


@pytest.mark.parametrize(("names", "values", "options", "message"), [
    (NAMES, VALUES[:, :1], {}, r"values must be \(N, 2\), one column for each of .*\(3, 1\)"),
    (("text", "text"), VALUES, {}, r"names must differ, got \('text', 'text'\)"),
    (NAMES, VALUES / 2, {}, "values must be integers, got float64"),
    (NAMES, VALUES - 1, {}, "values must not be negative, got -1 for sample 1, vision"),
    (NAMES, VALUES, {"sources": [0, 1]}, r"sources must be 3 numbers from 0, .* shape \(2,\)"),
    (NAMES, VALUES, {"sources": [0, 1, -1]}, "sources must be 3 numbers from 0, one per sample"),
    (NAMES, VALUES, {"padded": ("audio",)}, r"padded must be among .*, got \('audio',\)"),
])
def test_sizes_that_are_refused(names, values, options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SampleSizes(names, values, **options)


def test_defaults_are_one_source_and_padded_text() -> None:
    sizes = SampleSizes(NAMES, VALUES)
    assert (sizes.totals, sizes.padded, sizes.sources.tolist()) == ((4, 16), ("text",), [0] * 3)
    assert [sizes.column(name) for name in NAMES] == [0, 1]
    assert SampleSizes(NAMES, np.zeros((0, 2))).totals == (0, 0)


def test_groups_are_slices_between_offsets() -> None:
    plan = MiniBatchPlan(
        "random", 2, np.array([4, 2, 0, 3, 1]), np.array([0, 2, 3, 3, 5]), np.array([]), True, None,
        seed=0, epoch=0,
    )
    assert plan.steps == 2 and plan.groups == 4
    groups = [plan.group(step, rank).tolist() for step in range(2) for rank in range(2)]
    assert groups == [[4, 2], [0], [], [3, 1]]


@pytest.mark.parametrize(("budgets", "message"), [
    ((9,), r"budgets must be 2, one for each of \('vision', 'text'\), got \(9,\)"),
    ((0, 9), "the budget of vision must be at least 1, got 0"),
    ((3, 8), "sample 1 has 9 units of text, above the budget of 8: raise the budget to at least 9"),
])
def test_budgets_that_are_refused(budgets, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        checked_budgets(SampleSizes(NAMES, VALUES), budgets)
    assert checked_budgets(SampleSizes(NAMES, VALUES), (3, 9)) == (3, 9)


def test_ranks_and_seeds_that_are_refused() -> None:
    sizes = SampleSizes(NAMES, VALUES)
    checked(sizes, 3)
    with pytest.raises(PlanError, match="ranks must be at least 1, got 0"):
        checked(sizes, 0)
    with pytest.raises(PlanError, match="4 ranks need a sample each; there are only 3 samples"):
        checked(sizes, 4)
    with pytest.raises(PlanError, match="seed and epoch must not be negative, got 0 and -1"):
        generator(0, -1)
    assert generator(1, 0).random() != generator(0, 1).random()
