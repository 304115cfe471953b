"""The roofline of a module: its limits, and fields that are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.multiplex.roofline import ModuleWork

SECONDS = st.floats(0.01, 100)
SHARE = st.floats(0.05, 1)


@given(SECONDS, SECONDS, st.integers(1, 64), SHARE)
def test_a_sharp_ridge_is_the_larger_of_compute_and_memory(compute, memory, degree, share):
    work = ModuleWork("m", compute, memory, fixed_seconds=0.5, ridge=20.0)
    larger = max(compute / share, memory / min(share / work.saturation, 1)) / degree
    assert work.seconds(degree, share) - 0.5 == pytest.approx(larger, rel=0.04)


@given(SECONDS, SECONDS, SHARE, SHARE, st.integers(1, 32))
def test_more_of_a_device_or_more_devices_never_take_longer(compute, memory, one, other, degree):
    work = ModuleWork("m", compute, memory, parallel=8.0)
    less, more = sorted((one, other))
    assert work.seconds(degree, more) <= work.seconds(degree, less) * (1 + 1e-12)
    assert work.seconds(2 * degree, more) <= work.seconds(degree, more) * (1 + 1e-12)
    assert 0 < work.bandwidth(more) <= 1


def test_an_all_reduce_grows_towards_its_limit():
    alone, reduced = (ModuleWork("m", 1, 1, reduce_seconds=s) for s in (0.0, 2.0))
    added = [reduced.seconds(d, 1.0) - alone.seconds(d, 1.0) for d in (1, 2, 4)]
    assert added == pytest.approx([0, 1, 1.5])


@pytest.mark.parametrize(
    "field, value", [("compute_seconds", 0), ("fixed_seconds", -1), ("saturation", 2), ("ridge", 0)]
)
def test_invalid_fields_are_named(field, value):
    with pytest.raises(PlanError, match=f"m.{field}"):
        ModuleWork(**({"name": "m", "compute_seconds": 1, "memory_seconds": 1} | {field: value}))
