"""Marks of a step as seconds on the wall clock."""

import time

import pytest
import torch

from raymm.actors.executor.step_clock import DeviceClock, HostClock, step_clock


def test_host_marks_are_wall_clock_seconds():
    clock = step_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before = time.time()
    marks = [clock.mark() for _ in range(3)]
    found = clock.seconds(marks)
    assert found == sorted(found) and clock.seconds([]) == []
    assert found[0] == pytest.approx(before, abs=60.0)
    assert found[2] - found[0] == pytest.approx(marks[2] - marks[0], abs=1e-4)


class Device:
    """A device that takes three seconds from event to event, whenever the host comes by."""

    passed = 0
    waited: list["Device"] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Device.passed
        Device.passed += 3

    def synchronize(self) -> None:
        Device.waited.append(self)

    def elapsed_time(self, other: "Device") -> float:
        assert Device.waited  # nothing is known of events that have not passed
        return (other.at - self.at) * 1e3


def test_device_marks_are_read_when_the_last_has_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Device)
    before = time.time()
    clock = DeviceClock()
    marks = [clock.mark() for _ in range(3)]
    found = clock.seconds(marks)
    assert Device.waited == [marks[-1]]
    assert [b - a for a, b in zip(found, found[1:], strict=False)] == pytest.approx([3, 3])
    assert found[0] - 3 == pytest.approx(before, abs=60.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_is_timed_not_its_queue():
    clock = step_clock(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda")
    first = clock.mark()
    start = time.perf_counter()
    for _ in range(50):
        a @ a
    handed_over = time.perf_counter() - start
    seconds = clock.seconds([first, clock.mark()])
    assert seconds[1] - seconds[0] > handed_over / 2
