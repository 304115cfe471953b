"""Conversion of quotas to groups of multiprocessors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.quota.partition import Multiprocessors, partition
from raymm.errors import PlanError

H100 = Multiprocessors()
GPUS = st.builds(
    lambda granularity, groups, rest: Multiprocessors(
        granularity * groups + min(rest, granularity - 1), granularity
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
    st.integers(0, 7),
)


@st.composite
def cases(draw):
    """Draw a GPU, and quotas that it can grant: sums of 1 and below."""
    gpu = draw(GPUS)
    weights = draw(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6))
    scale = draw(st.floats(0.3, 1.0)) if draw(st.booleans()) else 1.0
    quotas = {f"m{i}": scale * w / sum(weights) for i, w in enumerate(weights)}
    return gpu, {m: q for m, q in quotas.items() if q >= gpu.smallest_quota}


@given(cases())
def test_partitions_are_disjoint_rounded_and_inside_the_gpu(case):
    gpu, quotas = case
    if not quotas:
        return
    found = partition(quotas, gpu)
    assert [one.module for one in found] == list(quotas)
    held: set[int] = set()
    for one in found:
        mine = set(range(one.first_group, one.first_group + one.groups))
        assert mine and not mine & held
        held |= mine
        if not one.whole:
            assert one.sms == one.groups * gpu.granularity
            # Rounded down or up, never further.
            assert abs(one.sms - one.asked_sms) < gpu.granularity + 1e-6
    assert held <= set(range(gpu.groups))
    assert sum(one.sms for one in found) <= gpu.total
    if not found[0].whole:
        # In total to the nearest group: no requested group stays idle.
        wanted = math.fsum(quotas.values()) * gpu.total
        spare = gpu.groups * gpu.granularity - sum(one.sms for one in found)
        short = wanted - sum(one.sms for one in found)
        assert short <= gpu.granularity / 2 + 1e-6 or spare == 0
    for one in found:
        for other in found:
            assert one.overlaps(other) == (one is other)


@given(cases())
def test_larger_quotas_get_at_least_as_much(case):
    gpu, quotas = case
    if len(quotas) < 2:
        return
    found = partition(quotas, gpu)
    for one in found:
        for other in found:
            if one.quota > other.quota + 1e-6:
                assert one.sms >= other.sms


def groups(quotas, gpu=H100):
    return [(one.first_group, one.groups, one.sms) for one in partition(quotas, gpu)]


def test_an_h100():
    assert (H100.total, H100.granularity, H100.groups) == (132, 8, 16)
    assert groups({"a": 0.5, "b": 0.5}) == [(0, 8, 64), (8, 8, 64)]
    assert groups({"a": 2 / 3, "b": 1 / 3}) == [(0, 11, 88), (11, 5, 40)]
    assert groups({"a": 0.3}) == [(0, 5, 40)]
    assert groups({"a": 24 / 132, "b": 8 / 132}) == [(0, 3, 24), (3, 1, 8)]
    # Ten times 13.2 multiprocessors: six are rounded up, in the order of names.
    assert [g for _, g, _ in groups({str(i): 0.1 for i in range(10)})] == [2] * 6 + [1] * 4


def test_a_module_alone_gets_all_multiprocessors():
    (one,) = partition({"llm": 1.0}, H100)
    assert one.whole and one.sms == 132 and one.share == 1.0
    (almost,) = partition({"llm": 0.99}, H100)
    assert not almost.whole and almost.sms == 128
    assert one.overlaps(almost) and almost.overlaps(one)


def test_requested_and_granted_quotas_are_reported():
    first, _ = partition({"vision": 0.6, "audio": 0.4}, H100)
    assert (first.quota, first.sms, first.share) == (0.6, 80, 80 / 132)
    assert str(first) == (
        "'vision': requested 0.6 (79.2 SMs), granted 80 of 132 SMs (0.6061), groups 0 to 9"
    )


def test_fewer_groups_than_multiprocessors_suggest():
    gpu = Multiprocessors(132, 8, 14)
    found = partition({"a": 0.75, "b": 0.125, "c": 0.125}, gpu)
    assert [one.groups for one in found] == [10, 2, 2]
    with pytest.raises(PlanError, match="15 modules and the GPU has 14 groups"):
        partition({str(i): 1 / 15 for i in range(15)}, gpu)


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({}, "quotas are empty"),
        ({"a": 0.7, "b": 0.4}, r"sum to 1\.1; accepted: at most 1"),
        ({"a": 0.05}, r"quota of 'a' is 0\.05 \(6\.6 of 132 .*accepted: 0\.06061 \(8 "),
        ({"a": 0.0}, "quota of 'a' is 0.0"),
        ({"a": -0.5}, "quota of 'a' is -0.5"),
        ({"a": 1.5}, "quota of 'a' is 1.5"),
        ({"a": math.nan}, "quota of 'a' is nan"),
        ({"a": math.inf}, "quota of 'a' is inf"),
        ({"a": "0.5"}, "quota of 'a' is '0.5'; accepted: a number from 0.06061 to 1"),
        ({"a": None}, "quota of 'a' is None; accepted: a number"),
        ({"a": [0.5]}, r"quota of 'a' is \[0.5\]; accepted: a number"),
        ({"a": True}, "quota of 'a' is True; accepted: a number"),
        ({"a": 10**400}, "quota of 'a' is 10.*; accepted: a number"),
        ({"a": 0.5, "b": 0.5 + 3e-9}, r"sum to 1\.000000003; accepted: at most 1"),
    ],
)
def test_impossible_grants_are_refused(quotas, message):
    with pytest.raises(PlanError, match=message):
        partition(quotas, H100)


def test_sums_of_one_in_floating_point_are_accepted():
    quotas = {"a": 0.1, "b": 0.2, "c": 0.7}
    quotas["c"] += 1e-12
    assert sum(one.sms for one in partition(quotas, H100)) == 128


@pytest.mark.parametrize("wrong", [
    (132, 0), (4, 8), (132, 8, 0), (132, 8, 17), (132.0, 8), (132, 8.5), ("132", 8), (132, True),
    (132, 8, 2.0),
])
def test_impossible_gpus_are_refused(wrong):
    with pytest.raises(PlanError, match="accepted"):
        Multiprocessors(*wrong)
