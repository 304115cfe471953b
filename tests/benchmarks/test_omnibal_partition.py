"""OmniBal's candidates equal an enumeration of all neighbours."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.omnibal_partition import (
    greedy_start,
    partition_candidates,
)
from benchmarks.baselines.parametric_partition import partition_layers
from raymm.errors import NoPlanError


@st.composite
def cases(draw: st.DrawFn):
    n = draw(st.integers(1, 12))
    times = st.one_of(st.integers(0, 9), st.floats(0, 9, allow_subnormal=False))
    forward = draw(st.lists(times, min_size=n, max_size=n))
    volumes = draw(st.lists(st.sampled_from([0, 1, 4, 4.5, 10]), min_size=n, max_size=n))
    return forward, volumes, draw(st.integers(1, min(n, 5))), draw(st.integers(0, 3))


def all_partitions(n, stages):
    for cuts in itertools.combinations(range(1, n), stages - 1):
        yield tuple(itertools.pairwise((0, *cuts, n)))


def variance(forward, ranges):
    times = [sum(forward[lo:hi]) for lo, hi in ranges]
    return statistics.pvariance(times) * len(times)


def communication(volumes, ranges):
    return sum(volumes[hi - 1] for _, hi in ranges[:-1])


def within(origin, ranges, radius):
    return all(abs(a[0] - b[0]) <= radius for a, b in zip(origin, ranges, strict=True))


@given(cases(), st.integers(1, 10), st.booleans())
def test_candidates_are_the_best_of_all_jitters(case, top, exact_origin):
    forward, volumes, stages, radius = case
    origin = partition_layers(forward, stages) if exact_origin else None
    found = partition_candidates(forward, volumes, stages, radius, origin, top)
    near = [
        ranges
        for ranges in all_partitions(len(forward), stages)
        if within(origin or greedy_start(forward, stages), ranges, radius)
    ]
    scores = [0.0] * len(near)
    for metric in (
        [variance(forward, ranges) for ranges in near],
        [communication(volumes, ranges) for ranges in near],
    ):
        span = max(metric) - min(metric)
        if span > 1e-9 * max(metric):
            scores = [s + (m - min(metric)) / span for s, m in zip(scores, metric, strict=True)]
    assert len(found) == min(top, len(near))
    assert len({candidate.ranges for candidate in found}) == len(found)
    expected = dict(zip(near, scores, strict=True))
    for candidate, best in zip(found, sorted(scores), strict=False):
        assert candidate.score == pytest.approx(best, abs=1e-6)
        assert expected[candidate.ranges] == pytest.approx(candidate.score, abs=1e-6)
        assert candidate.variance == pytest.approx(variance(forward, candidate.ranges), abs=1e-6)
        assert candidate.communication == communication(volumes, candidate.ranges)


def test_a_cut_moves_to_where_tokens_were_merged():
    # A vision tower whose output shrinks after layer 5: a cut one layer off balance saves much.
    forward, volumes = [1.0] * 12, [8, 8, 8, 8, 8, 8, 1, 1, 1, 1, 1, 1]
    best, *_ = partition_candidates(forward, volumes, 2, radius=1)
    assert greedy_start(forward, 2) == ((0, 6), (6, 12))
    assert best.ranges == ((0, 7), (7, 12))
    assert (best.variance, best.communication) == (2.0, 1.0)


@pytest.mark.parametrize(
    "forward", [[0.1] * 300, [1.0 + (7 * layer % 5) / 10 for layer in range(300)], [0] * 300]
)
def test_many_stages_do_not_explode(forward):
    # 7^23 neighbours: neither they nor the equally good ones fit in memory as a list.
    found = partition_candidates(forward, [1.0] * 300, 24, radius=3, top=50)
    assert len({candidate.ranges for candidate in found}) == 50
    assert [c.score for c in found] == sorted(c.score for c in found)
    spread = variance(forward, found[0].ranges)
    assert spread <= variance(forward, greedy_start(forward, 24))
    assert spread == pytest.approx(found[0].variance)


def test_wrong_arguments_are_refused():
    with pytest.raises(NoPlanError, match="3 layers allow"):
        partition_candidates([1, 1, 1], [1, 1, 1], 4)
    with pytest.raises(NoPlanError, match="output_bytes has 2 entries"):
        partition_candidates([1, 1, 1], [1, 1], 2)
    with pytest.raises(NoPlanError, match="costs: the entry for layer 1"):
        partition_candidates([1, -1, 1], [1, 1, 1], 2)
    with pytest.raises(ValueError, match="radius is -1"):
        partition_candidates([1, 1, 1], [1, 1, 1], 2, radius=-1)
    for origin in (((0, 3),), ((0, 1), (2, 3)), ((0, 0), (0, 3)), ((0, 1), (1, 2))):
        with pytest.raises(NoPlanError, match="origin is"):
            partition_candidates([1, 1, 1], [1, 1, 1], 2, origin=origin)
