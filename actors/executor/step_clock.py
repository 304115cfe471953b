"""Clocks that measure when a rank's tasks run, for the timeline of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from raymm.kernels.collectives.waiting import waits_for_others


class StepClock(Protocol):
    """Clock that marks moments of a step. The times in seconds are available after the step."""

    def mark(self) -> Any:
        """Mark this moment, in the order of the current stream's work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the marked moments on this host's wall clock. Waits until the last one has
        passed."""
        ...


class HostClock:
    """Clock for a CPU, where work is done when the call returns."""

    mark = staticmethod(time.perf_counter)
    """Mark this moment."""

    def __init__(self) -> None:
        self._wall = time.time() - time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [self._wall + mark for mark in marks]


class DeviceClock:
    """Clock for a GPU: marks are events on the current stream. The stream is idle when the clock
    starts, because the previous step waited for its last event. The first event therefore passes at
    once, at a known time."""

    def __init__(self) -> None:
        self._first = self.mark()
        self._wall = time.time()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @waits_for_others  # the device waits for messages of other processes
    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        if marks:
            marks[-1].synchronize()
        return [self._wall + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def step_clock(device: torch.device) -> StepClock:
    """Start a clock for one step on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
