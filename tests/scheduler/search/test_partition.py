"""Partitions compared with all cut positions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.parametric_partition import partition_layers
from raymm.errors import NoPlanError
from raymm.scheduler.search.partition import (
    cost_matrix,
    even_layers,
    partition_matrix,
)


def partition_with_cuts(costs, stages, cut_costs=None, feasible=None):
    return partition_matrix(cost_matrix(costs, cut_costs), stages, feasible)


def range_costs(costs, ranges, cut_costs=None):
    """Return the costs of a partition's stages, as the solvers count them."""
    matrix = cost_matrix(costs, cut_costs)
    return tuple(float(matrix[lo, hi]) for lo, hi in ranges)


whole = st.integers(0, 12)
# Very different sizes, so that sums round, including exact zeros.
real = st.one_of(
    st.just(0.0), st.floats(0, 1, allow_subnormal=False), st.floats(1e-9, 1e9), st.just(0.1)
)
near = st.floats(1, 1.02)  # optima that differ by little


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], int]:
    costs = draw(st.lists(draw(st.sampled_from([whole, real, near])), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


def all_ranges(num_layers: int, stages: int):
    for cuts in itertools.combinations(range(1, num_layers), stages - 1):
        bounds = (0, *cuts, num_layers)
        yield tuple(itertools.pairwise(bounds))


def brute_force(costs, stages, cut_costs=None, feasible=lambda index, lo, hi: True):
    """Return (least bottleneck, least sum of squares under it), or None."""
    prefix = [0.0, *itertools.accumulate(map(float, costs))]
    at_cut = [0.0, *(cut_costs or [0] * len(costs))[1:], 0.0]
    found = []
    for ranges in all_ranges(len(costs), stages):
        if all(feasible(i, lo, hi) for i, (lo, hi) in enumerate(ranges)):
            times = [prefix[hi] - prefix[lo] + at_cut[lo] + at_cut[hi] for lo, hi in ranges]
            found.append((max(times), sum(t * t for t in times)))
    return min(found, default=None)


def check_ranges(ranges, num_layers, stages):
    assert len(ranges) == stages
    assert ranges[0][0] == 0 and ranges[-1][1] == num_layers
    assert all(lo < hi for lo, hi in ranges)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@given(layers())
def test_the_probe_is_exact(case):
    costs, stages = case
    ranges = partition_layers(costs, stages)
    check_ranges(ranges, len(costs), stages)
    assert max(range_costs(costs, ranges)) == brute_force(costs, stages)[0]


def test_a_sum_that_rounds_down_does_not_shorten_a_stage():
    # Prefix sums 3.5000000000000004 - 1.3 give 2.2, but 1.3 + 2.2 gives 3.5.
    costs = [1.1, 0.2, 1.1, 1.1, 0.1, 1.1]
    bottleneck = max(range_costs(costs, partition_layers(costs, 3)))
    assert bottleneck == brute_force(costs, 3)[0] == 2.2


@given(layers(), st.data())
def test_the_programme_is_exact_with_cut_costs_and_limits(case, data):
    costs, stages = case
    n = len(costs)
    cut_costs = data.draw(
        st.none() | st.lists(st.sampled_from([0, 1, 2.5, 7]), min_size=n, max_size=n)
    )
    refused = data.draw(
        st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, n), st.integers(0, n)))
    )

    def feasible(index, lo, hi):
        assert 0 <= index < stages and index <= lo < hi <= n
        return (index, lo, hi) not in refused

    expected = brute_force(costs, stages, cut_costs, feasible)
    allowed = np.ones((stages, n + 1, n + 1), dtype=bool)
    for entry in refused:
        allowed[entry] = False
    if expected is None:
        for limit in (feasible, allowed):
            with pytest.raises(NoPlanError, match="feasible"):
                partition_with_cuts(costs, stages, cut_costs, limit)
        return
    ranges = partition_with_cuts(costs, stages, cut_costs, feasible)
    assert ranges == partition_with_cuts(costs, stages, cut_costs, allowed)
    check_ranges(ranges, n, stages)
    assert all(feasible(i, lo, hi) for i, (lo, hi) in enumerate(ranges))
    times = range_costs(costs, ranges, cut_costs)
    assert max(times) == expected[0]
    assert sum(t * t for t in times) == pytest.approx(expected[1], rel=1e-9)


@given(st.lists(real, min_size=40, max_size=120), st.integers(1, 40))
def test_both_solvers_agree_on_long_models(costs, stages):
    probe, programme = partition_layers(costs, stages), partition_with_cuts(costs, stages)
    check_ranges(probe, len(costs), stages)
    assert max(range_costs(costs, probe)) == max(range_costs(costs, programme))


def test_spare_capacity_is_spread_over_the_stages():
    # The bottleneck is the one heavy layer; all later ones could be in one stage.
    costs = [4, 1, 1, 1, 1]
    assert partition_with_cuts(costs, 3) == ((0, 1), (1, 3), (3, 5))
    assert partition_layers(costs, 3) == ((0, 1), (1, 3), (3, 5))
    # Equal layers that do not divide evenly: 4+3+3, not 4+4+2.
    for solver in (partition_layers, partition_with_cuts):
        assert sorted(hi - lo for lo, hi in solver([1] * 10, 3)) == [3, 3, 4]


def test_an_expensive_cut_is_avoided():
    costs = [1, 1, 1, 1]
    assert partition_with_cuts(costs, 2) == ((0, 2), (2, 4))
    assert partition_with_cuts(costs, 2, [0, 0, 5, 0]) in (
        ((0, 1), (1, 4)),
        ((0, 3), (3, 4)),
    )


def test_a_limit_that_depends_on_the_stage():
    # The first stage holds twice the activations, so it may have half as many layers.
    ranges = partition_with_cuts(
        [1, 1, 1, 1, 1], 2, feasible=lambda index, lo, hi: (2 - index) * (hi - lo) <= 4
    )
    assert ranges == ((0, 2), (2, 5))
    with pytest.raises(NoPlanError, match="no partition of 5 layers into 2 stages"):
        partition_with_cuts([1] * 5, 2, feasible=lambda index, lo, hi: hi - lo <= 2)


def test_costs_of_whole_stages():
    # A stage whose first layer is layer 0 saves 3: the cut moves right.
    matrix = cost_matrix([2, 2, 2, 2])
    matrix[0, 1:] -= np.minimum(3, matrix[0, 1:])
    assert partition_matrix(matrix, 2) == ((0, 3), (3, 4))


def test_even_layers():
    assert even_layers(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))


@pytest.mark.parametrize("stages", [0, 4, -1])
def test_stages_that_cannot_be_filled_are_refused(stages):
    for partition in (partition_layers, partition_with_cuts):
        with pytest.raises(NoPlanError, match="stages is .*3 layers allow 1..3"):
            partition([1, 1, 1], stages)
    with pytest.raises(NoPlanError, match="stages is"):
        even_layers(3, stages)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_invalid_partition_costs_are_refused(bad):
    with pytest.raises(NoPlanError, match="costs: the entry for layer 1"):
        partition_layers([1, bad], 1)
    with pytest.raises(NoPlanError, match="cut_costs"):
        partition_with_cuts([1, 1], 2, [0, bad])
    with pytest.raises(NoPlanError, match="cut_costs has 1 entries"):
        partition_with_cuts([1, 1], 2, [0])
    with pytest.raises(NoPlanError, match="shape"):
        partition_with_cuts([1, 1], 2, feasible=np.ones((2, 2, 2), dtype=bool))
    with pytest.raises(NoPlanError, match="sum is not finite"):
        partition_layers([1.7e308, 1.7e308], 1)


def test_costs_of_any_size():
    for scale in (1e-300, 1e300):
        costs = [scale * c for c in (3, 1, 2, 2, 1, 3)]
        for solver in (partition_layers, partition_with_cuts):
            assert solver(costs, 3) == ((0, 2), (2, 4), (4, 6))
    assert len(partition_with_cuts([0.0] * 5, 3)) == len(partition_layers([0.0] * 5, 3)) == 3
