"""The device table: lookup, and invalid numbers."""

from dataclasses import replace

import pytest

from raymm.errors import PlanError
from raymm.scheduler.costs.devices import DEVICES, Link, find_device


def test_device_names_match_in_any_spelling():
    assert find_device("a100-80gb") is DEVICES["A100-80GB"]
    assert find_device("RTX 4090") is DEVICES["RTX4090"]
    assert find_device("cpu").name == "cpu"


def test_an_unknown_name_is_refused_with_the_accepted_ones():
    with pytest.raises(PlanError, match="device is 'B9000'; accepted: A40, A100-40GB"):
        find_device("B9000")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_has_both_dtypes_and_a_slower_network(device):
    assert device.peak("bf16") >= device.peak("fp32")
    size = 64 * 2**20
    assert device.across_nodes.seconds(size) >= device.within_node.seconds(size)
    # FLOPs per byte read: no device is bound by the wrong side.
    assert 1 < device.peak("bf16") / device.memory_bandwidth < 1000


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(PlanError, match="dtype is 'fp8'; A40 has rates for bf16, fp32"):
        find_device("A40").peak("fp8")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"memory_bandwidth": 0.0}, "memory_bandwidth of 'A40' is 0.0"),
        ({"efficiency": 1.5}, "efficiency of 'A40' is 1.5; at most 1"),
        ({"flops": {"bf16": float("nan")}}, "bf16 of 'A40' is nan"),
    ],
)
def test_impossible_devices_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        replace(find_device("A40"), **change)


def test_a_link_is_latency_and_bandwidth():
    assert Link(1e-3, 1e6).seconds(2000) == pytest.approx(3e-3)
    with pytest.raises(PlanError, match="bandwidth 0"):
        Link(1e-3, 0)
