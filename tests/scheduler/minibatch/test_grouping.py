"""ISF equals the printed Algorithms 1 and 2, and the authors' figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.baseline import solutions
from benchmarks.shared.isf import (
    MINIBATCHES,
    isf_groups,
    plan_isf,
    search_budgets,
    statistical_budgets,
)
from raymm.errors import PlanError
from raymm.scheduler.minibatch.methods import plan_random
from raymm.scheduler.minibatch.metrics import balance
from raymm.scheduler.minibatch.problem import SampleSizes
from tests.support.minibatch_data import real, sizes


def printed(
    rows: list[list[int]], budgets: list[int], full: list[int], iterations: int,
    keep_rest: bool, random: np.random.Generator,
) -> list[list[int]]:
    """Run Algorithms 1 and 2, line by line; skip samples above a budget, as the code does."""
    data = [i for i, row in enumerate(rows) if all(map(int.__le__, row, budgets))]
    result = []
    for iteration in range(iterations):
        data = random.permutation(data).tolist()
        candidates, group = [], []
        for sample in data:
            group.append(sample)
            if any(sum(rows[i][c] for i in group) > q for c, q in enumerate(budgets)):
                candidates.append(group[:-1])
                group = [sample]
        if group:
            candidates.append(group)
        for group in candidates:
            reached = [sum(rows[i][c] for i in group) >= q for c, q in enumerate(full)]
            if any(reached) or (keep_rest and iteration == iterations - 1):
                result.append(group)
                data = [sample for sample in data if sample not in group]
        if not data:
            break
    return result


@given(
    sizes(most=40), st.integers(1, 300), st.integers(0, 50), st.integers(1, 4), st.booleans(),
    st.integers(0, 5),
)
def test_groups_are_those_of_the_printed_algorithms(
    of, budget, margin, iterations, keep_rest, seed
) -> None:
    budgets = np.full(len(of.names), budget)
    full = np.maximum(budgets - margin, 1)
    samples, offsets = isf_groups(
        of.values, budgets, full, iterations, keep_rest, np.random.default_rng(seed)
    )
    found = [samples[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    assert found == printed(
        of.values.tolist(), budgets.tolist(), full.tolist(), iterations, keep_rest,
        np.random.default_rng(seed),
    )


@pytest.mark.parametrize(
    ("name", "pad", "vision", "text"), [("ai2d", 0.38, 0.31, 0.18), ("chartqa", 0.085, 0.05, 0.083)]
)
def test_random_batches_of_four_on_eight_ranks(name, pad, vision, text) -> None:
    found = balance(plan_random(real(name), 8), real(name))
    assert found.pad["text"] == pytest.approx(pad, abs=0.01)
    assert found.dist == pytest.approx({"vision": vision, "text": text}, abs=0.01)


@pytest.mark.parametrize(("name", "text"), [("ai2d", 0.035), ("chartqa", 0.049)])
def test_searched_isf_has_the_figures_of_the_authors_code(name: str, text: float) -> None:
    of = real(name)
    plan = plan_isf(of, 8, search_budgets(of, 8), iterations=50)
    found = balance(plan, of)
    assert found.pad == {"text": 0.0}
    assert found.dist["vision"] < 0.001
    assert found.dist["text"] == pytest.approx(text, abs=0.005)
    assert 4 <= found.average_batch <= 5
    assert 0 < found.left_out < 100


def test_statistics_give_the_last_modality_its_longest_sample() -> None:
    # 691 tokens and 2.49 tiles per sample, the longest has 1501 tokens.
    assert statistical_budgets(real("ai2d")) == (5, 1501)
    # InternVL-Chat-1.2 in §5.1: Q_t = 4K and Q_v = 9, so about 450 tokens per tile.
    assert statistical_budgets(SampleSizes(("v", "t"), np.array([[2, 910], [1, 455]])), 4096) == (
        9, 4096,
    )


def test_samples_above_a_budget_are_left_out_and_counted() -> None:
    of = SampleSizes(("v", "t"), np.array([[1, 100]] * 10 + [[9, 100]]))
    plan = plan_isf(of, 2, (2, 200))
    assert plan.left_out.tolist()[-1] == 10


def test_a_failed_search_reports_its_trials() -> None:
    of = SampleSizes(("v", "t"), np.array([[1, 5000]] * 40))
    with pytest.raises(PlanError, match="no budgets make groups of 4 to 5 samples; tried"):
        search_budgets(of, 32)
    with pytest.raises(PlanError, match="there are no units of v"):
        search_budgets(SampleSizes(("v", "t"), np.array([[0, 5]] * 8)), 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"budgets": (1, 0)}, "numbers above 0"),
        ({"budgets": (9, 90)}, "fewer than the 2 ranks"),
    ],
)
def test_samples_that_isf_cannot_plan_are_named(options: dict, match: str) -> None:
    of = SampleSizes(("vision", "text"), np.array([[1, 10], [2, 20], [3, 30]]))
    with pytest.raises(PlanError, match=match):
        plan_isf(of, 2, **options)


def test_isf_is_a_registered_baseline() -> None:
    plan = MINIBATCHES[0].solve((real("ai2d"), 8))
    assert plan.method == MINIBATCHES[0].name == "isf"
    few = SampleSizes(("vision", "text"), np.array([[1, 10]]))
    (reason,) = solutions(MINIBATCHES, (few, 2)).values()
    assert isinstance(reason, str) and "2 ranks need a sample each" in reason
