"""Seconds per step, and tokens per second since the last printed line."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Measures steps by the times at which their results are read.

    With several steps in flight, a result may be ready long before it is read: the driver was busy,
    or the run pauses and reads all results at once. The time between two reads is then a fraction
    of the step. A step takes at least as long as its busiest stage computes, and speeds are means
    over all steps since the last printed line.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last_read = now()
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._tokens, self._elapsed, self._busiest = 0, 0.0, 0.0

    def restart(self) -> None:
        """Restart the clock with no step in flight, at the start of a run or after a pause."""
        self._last_read = self._now()

    def read(self, tokens: int, busiest: float) -> float:
        """Return the seconds of the step whose result was just read.

        Args:
            busiest: seconds that its busiest stage computed.
        """
        now = self._now()
        elapsed, self._last_read = now - self._last_read, now
        if self._steps == 1:  # the first step waited for data and built what later steps reuse
            self._forget()
        self._steps += 1
        self._tokens += tokens
        self._elapsed += elapsed
        self._busiest += busiest
        return max(elapsed, busiest)

    def speed(self) -> float:
        """Return tokens per second since the last call. The run's first step counts only if no
        other step was read."""
        speed = self._tokens / max(self._elapsed, self._busiest, 1e-9)
        self._forget()
        return speed
