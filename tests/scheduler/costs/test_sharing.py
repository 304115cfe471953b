"""Times of modules that share devices follow their surfaces and the interference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.costs.surface import ScalingSurface

LAW = Interference(constant=0.1, product=0.5, coupling="own")


def surface(name: str, power: float = 1.0, degrees=(1, 2), quotas=(2, 4)) -> ScalingSurface:
    """Return seconds 8 / (degree * quota) ** power in quarters of a device."""
    return ScalingSurface(
        name, degrees, quotas, 4,
        tuple(tuple(8.0 / (d * q / 4) ** power for q in quotas) for d in degrees),
        (0,) * len(degrees), tuple(q / 10 for q in quotas),
    )


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.25, 0.5, 1.0]))
def test_time_without_a_surface_is_inversely_proportional(degree, quota):
    sharing = DeviceSharing((surface("b", degrees=(2, 4)),))  # not measured on one device
    for name in ("a", "b"):
        assert not sharing.has(name) and sharing.most_devices(name) == 1
        assert sharing.seconds(name, degree, {name: quota}) == pytest.approx(1 / degree / quota)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.25, 0.5, 1.0]), st.floats(0.3, 1.0))
def test_time_beyond_the_samples_is_inversely_proportional(degree, quota, power):
    sharing = DeviceSharing((surface("a", power),))
    sampled, share = min(degree, 2), max(quota, 0.5)
    expected = (sampled * share) ** -power * (sampled / degree) * (share / quota)
    assert sharing.seconds("a", degree, {"a": quota}) == pytest.approx(expected)
    assert sharing.most_devices("a") == 2


def test_neighbours_delay_a_module():
    sharing = DeviceSharing((surface("a"), surface("b")), LAW)
    alone = sharing.seconds("a", 1, {"a": 0.5})
    delay = LAW.delay(0.2, [0.2])
    assert delay > 0
    assert sharing.seconds("a", 1, {"a": 0.5, "b": 0.5}) == pytest.approx(alone * (1 + delay))
    assert sharing.seconds("a", 1, {"a": 0.5, "other": 0.5}) == alone


def test_a_file_keeps_surfaces_and_interference():
    sharing = DeviceSharing((surface("a"), surface("b", 0.5)), LAW)
    assert DeviceSharing.from_dict(sharing.to_dict()) == sharing
    for wrong, field in (({"surfaces": []}, "interference"), ({"interference": {}}, "surfaces")):
        with pytest.raises(PlanError, match=f"sharing.*{field}"):
            DeviceSharing.from_dict(wrong)
