"""Order of samples in which consecutive shares of replicas take the same time."""

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.scheduler.graph.sample_ranges import share
from raymm.scheduler.minibatch.balanced import order_for_shares, plan_balanced
from raymm.scheduler.minibatch.measured_costs import Column, MeasuredCosts, ModuleCost, group_units
from raymm.scheduler.minibatch.problem import SampleSizes

MODULES = {"vision": ModuleCost(0.0, 0.3), "text": ModuleCost(0.2, 0.01)}
SHARED = MeasuredCosts(MODULES, {"vision": (0.5, 1.5), "text": (1.0,) * 3},
                       frozenset({"vision", "text"}))  # fmt: skip


def sizes_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return SampleSizes(
        ("vision", "text"), np.stack([rng.integers(0, 3, count), rng.integers(5, 60, count)], 1)
    )


def objective(group, sizes):
    """Return squared seconds per module and replica at mean speed, times the actual ones."""
    seconds = SHARED.of_samples(sizes.names, sizes.values)
    total = 0.0
    for column, name in enumerate(sizes.names):
        factors = SHARED.replicas[name]
        for copy, factor in enumerate(factors):
            own = share(len(group), copy, len(factors))
            total += factor * seconds[group[own.lo : own.hi], column].sum() ** 2
    return total


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_the_order_is_near_the_optimum(seed, count):
    sizes = sizes_of(count, seed)
    found = order_for_shares(np.arange(count), np.array([0, count]), sizes, SHARED)
    assert sorted(found) == list(range(count))
    best = min(objective(np.array(order), sizes) for order in permutations(range(count)))
    assert objective(found, sizes) <= 1.1 * best + 1e-9


def test_only_the_order_within_microbatches_changes():
    sizes = sizes_of(600)
    columns = [Column("vision", copy, 2) for copy in range(2)]
    plans = [plan_balanced(sizes, 2, samples_per_group=12, measured=costs)
             for costs in (MeasuredCosts(MODULES), SHARED)]  # fmt: skip
    np.testing.assert_array_equal(plans[0].offsets, plans[1].offsets)
    longest = []
    for plan in plans:
        groups = [plan.group(step, rank) for step in range(plan.steps) for rank in range(2)]
        assert [sorted(group) for group in groups] == [
            sorted(plans[0].group(step, rank)) for step in range(plan.steps) for rank in range(2)
        ]
        seconds = SHARED.column_seconds(columns, *group_units(sizes, groups, True, columns))
        longest.append(float((seconds.max(1) / seconds.sum(1)).mean()))
    assert longest[0] > 0.7 and longest[1] < 0.62


def test_without_shared_microbatches_nothing_changes():
    samples = np.array([3, 0, 2, 1])
    costs = MeasuredCosts(MODULES, {"text": (0.5, 1.5)})
    found = order_for_shares(samples, np.array([0, 4]), sizes_of(4), costs)
    np.testing.assert_array_equal(found, samples)
