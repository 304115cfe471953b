"""The fit of costs: brute force, noise, drift, slow replicas, and stalls."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.minibatch.cost_fit import LEAST_MICROBATCHES, PREFERENCE, CostFit, non_negative
from raymm.scheduler.minibatch.measured_costs import Column, MeasuredCosts, ModuleCost

NAMES = ("vision", "text")
TRUE = MeasuredCosts({
    "vision": ModuleCost(2e-3, 1e-3), "text": ModuleCost(5e-3, 1e-5, 4e-8)
})  # fmt: skip
SLOW = MeasuredCosts(TRUE.modules, {"text": (0.8, 1.2)})


def steps_of(costs, count, seed=0, noise=0.0, microbatches=8):
    """Return (units, squares, seconds) of steps: microbatches of samples of 100 to 1500 tokens."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        units, squares = np.zeros((2, microbatches, 2))
        for row in range(microbatches):
            samples = rng.integers(100, 1500, rng.integers(1, 6))
            units[row] = rng.integers(0, 6), samples.sum()
            squares[row] = units[row, 0] ** 2, (samples**2).sum()
        exact = costs.seconds(NAMES, units, squares)
        yield units, squares, exact * rng.lognormal(0, noise, exact.shape)


def fitted(steps, **options):
    fit = CostFit(NAMES, **options)
    errors = [fit.observe(*step) for step in steps]
    return fit, errors


def brute_force(products, moments):
    """Try every set of coefficients that may be above 0."""
    scale = np.sqrt(np.diag(products))
    matrix = products / np.outer(scale, scale) + np.diag([PREFERENCE, 1e-9, PREFERENCE])
    target = moments / scale
    best, found = 0.0, np.zeros(3)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            x = np.zeros(3)
            x[list(chosen)] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], target[list(chosen)])
            value = x @ matrix @ x - 2 * target @ x
            if (x >= 0).all() and value < best:
                best, found = value, x
    return found / scale


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_no_set_of_coefficients_is_better(seed, rows):
    rng = np.random.default_rng(seed)
    units = rng.uniform(1, 100, rows)
    data = np.stack([np.ones(rows), units, units**2 * rng.uniform(0.2, 1, rows)], 1)
    seconds = np.abs(data @ rng.normal(0, [10, 1, 0.1], 3))
    products, moments = data.T @ data, data.T @ seconds
    found, best = non_negative(products, moments), brute_force(products, moments)
    np.testing.assert_allclose(
        data @ found, data @ best, rtol=1e-4, atol=1e-6 * seconds.max(initial=1e-9)
    )
    assert (found >= 0).all()


def test_coefficients_are_recovered():
    fit, errors = fitted(steps_of(TRUE, 100))
    for name, cost in TRUE.modules.items():
        np.testing.assert_allclose(fit.costs().modules[name], cost, rtol=0.05, atol=1e-12)
    assert fit.costs().replicas == {} and errors[-1] < 0.01


def test_noise_hardly_moves_predictions():
    """Add 10 percent to every microbatch: predictions are off by at most that."""
    fit, errors = fitted(steps_of(TRUE, 200, noise=0.1))
    units, squares, exact = next(steps_of(TRUE, 1, seed=9))
    found = fit.costs().seconds(NAMES, units, squares)
    np.testing.assert_allclose(found, exact, rtol=0.06)
    assert 0.05 < np.mean(errors[-50:]) < 0.12


def test_slow_replicas_are_distinguished_from_costs():
    fit, errors = fitted(steps_of(SLOW, 100, noise=0.05), replicas={"text": 2})
    np.testing.assert_allclose(fit.costs().replicas["text"], (0.8, 1.2), atol=0.02)
    units, squares, exact = next(steps_of(SLOW, 1, seed=9))
    np.testing.assert_allclose(fit.costs().seconds(NAMES, units, squares), exact, rtol=0.06)
    blind, more = fitted(steps_of(SLOW, 100, noise=0.05))
    assert np.mean(more[-50:]) > 1.5 * np.mean(errors[-50:])
    assert "text" not in blind.costs().replicas


def test_replicas_sharing_microbatches_are_distinguished():
    """Give each a separate part of every microbatch; each has the fixed cost."""
    shared = MeasuredCosts(TRUE.modules, {"text": (0.8, 1.2)}, frozenset({"text"}))
    columns = (Column("vision"), Column("text", 0, 2), Column("text", 1, 2))
    fit = CostFit(NAMES, {"text": 2}, columns=columns)
    rng = np.random.default_rng(2)
    for units, squares, _ in steps_of(TRUE, 100):
        part = rng.uniform(0.1, 0.9, (len(units), 1))
        units, squares = (
            np.concatenate([v[:, :1], v[:, 1:] * part, v[:, 1:] * (1 - part)], 1)
            for v in (units, squares)
        )
        exact = shared.column_seconds(columns, units, squares)
        fit.observe(units, squares, exact * rng.lognormal(0, 0.05, exact.shape))
    costs = fit.costs()
    assert costs.shared == {"text"}
    np.testing.assert_allclose(costs.replicas["text"], (0.8, 1.2), atol=0.02)
    np.testing.assert_allclose(costs.column_seconds(columns, units, squares), exact, rtol=0.1)


def test_drift_is_followed():
    """Slow the language model down by two, and its second replica by two again."""
    fit, _ = fitted(steps_of(SLOW, 100), replicas={"text": 2}, half_life=10.0)
    later = MeasuredCosts(
        {**TRUE.modules, "text": ModuleCost(*(2 * c for c in TRUE.modules["text"]))},
        {"text": (0.6, 1.4)},
    )
    errors = [fit.observe(*step) for step in steps_of(later, 80, seed=5)]
    assert errors[0] > 0.3 and max(errors[-10:]) < 0.03
    np.testing.assert_allclose(fit.costs().replicas["text"], (0.6, 1.4), atol=0.02)
    keeping, _ = fitted(steps_of(SLOW, 100), replicas={"text": 2}, half_life=1e9)
    kept = [keeping.observe(*step) for step in steps_of(later, 80, seed=5)]
    assert min(kept[-10:]) > 3 * max(errors[-10:])


def test_a_stall_is_not_a_cost():
    fit, _ = fitted(steps_of(TRUE, 60))
    units, squares, seconds = next(steps_of(TRUE, 1, seed=3))
    seconds[2, 1] *= 1000
    fit.observe(units, squares, seconds)
    units, squares, exact = next(steps_of(TRUE, 1, seed=9))
    np.testing.assert_allclose(fit.costs().seconds(NAMES, units, squares), exact, rtol=0.15)


def test_equal_microbatches_fit_unit_costs():
    """Use the planner's microbatches, for which fixed and unit costs are inseparable."""
    fit = CostFit(("text",))
    for _ in range(30):
        fit.observe(np.full((4, 1), 1000.0), np.full((4, 1), 3e5), np.full((4, 1), 0.5))
    cost = fit.costs().modules["text"]
    assert 1000 * cost.linear == pytest.approx(0.5, rel=0.01) and cost.square * 3e5 < 0.01


def test_too_few_steps_give_no_costs():
    fit = CostFit(NAMES)
    step = next(steps_of(TRUE, 1, microbatches=LEAST_MICROBATCHES - 1))
    assert fit.observe(*step) is None and fit.costs() is None
    assert fit.observe(*step) is None and set(fit.costs().modules) == set(NAMES)
    assert fit.observe(*step) < 0.5


def test_a_module_without_items_does_not_matter():
    fit, _ = fitted([(u * [0, 1], q * [0, 1], s * [0, 1]) for u, q, s in steps_of(TRUE, 20)])
    assert set(fit.costs().modules) == {"text"}
    units, squares, seconds = next(steps_of(TRUE, 1))
    there = np.array([0, 1])
    assert fit.observe(units * there, squares * there, seconds * there) < 0.05
