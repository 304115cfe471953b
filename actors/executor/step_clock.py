"""When a rank's tasks ran: what a step's timeline is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from raymm.kernels.collectives.waiting import waits_for_others


class StepClock(Protocol):
    """Marks moments of a step; what they were in seconds is known once it is over."""

    def mark(self) -> Any:
        """This moment, in the order of the current stream's work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The marked moments on this host's wall clock. Waits until the last one has passed."""
        ...


class HostClock:
    """Work is done when the call returns: on a CPU."""

    mark = staticmethod(time.perf_counter)
    """This moment."""

    def __init__(self) -> None:
        self._wall = time.time() - time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """See :class:`StepClock`."""
        return [self._wall + mark for mark in marks]


class DeviceClock:
    """Work is handed over, and done later: marks are events on the current stream.

    The stream is idle when the clock starts, because the step before ended by waiting for its
    last event: the first event passes at once, at a known time.
    """

    def __init__(self) -> None:
        self._first = self.mark()
        self._wall = time.time()

    def mark(self) -> torch.cuda.Event:
        """This moment."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @waits_for_others  # whose messages the device waits for
    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See :class:`StepClock`."""
        if marks:
            marks[-1].synchronize()
        return [self._wall + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def step_clock(device: torch.device) -> StepClock:
    """A clock for one step on a device, which starts now."""
    return DeviceClock() if device.type == "cuda" else HostClock()
