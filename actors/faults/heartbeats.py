"""Detection of processes that hang, from their reports and the durations of earlier operations.

A process hangs if an operation takes five times as long as the longest operation of the same kind
so far, and at least ten seconds. Processes that wait for it do not count as hanging. An operation
that the process has never run before (a first forward may compile for minutes) may take as long as
the timeout for other processes. The same applies after a wrong suspicion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Look
from raymm.actors.faults.task_tracker import OWN_TASKS, Report

# Shortest limit in seconds: a machine may pause, a page may be swapped in, a disk may be slow.
LEAST_S = 10.0
# Limit of an operation as a multiple of the longest one of the same kind.
TIMES = 5.0
# Seconds between two checks. A process is reported one interval before it reaches its limit.
BEAT_S = 1.0
STOPPED = "stopped by a signal"


class Overdue(NamedTuple):
    """Process that takes too long, and the reason as text."""

    number: int
    why: str


class Heartbeats:
    """Durations that processes have reported so far. ``patience`` is the longest time that any
    operation may take, in seconds."""

    def __init__(self, patience: float) -> None:
        # A process that waits for a late one reports it first, when its wait times out.
        self._most = patience + 2 * BEAT_S
        self._longest: dict[int, dict[str, float]] = {}
        self._silent_since: dict[int, float] = {}

    def overdue(
        self, inquiry: Inquiry, now: float, look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> Overdue | None:
        """Record the processes' reports, and return the process that exceeds its limit by the
        largest factor; None if no process does. ``now`` is in seconds; ``look`` returns processes
        as seen from outside."""
        late: list[tuple[float, Overdue]] = []
        for number, report in inquiry.reports.items():
            self._silent_since.pop(number, None)
            self._note(number, report)
            for kind, seconds in self._under_way(report).items():
                limit = self._limit(number, kind)
                if seconds + BEAT_S >= limit:
                    why = f"in {kind}, {self._before(number, kind)}"
                    late.append((seconds / limit, Overdue(number, why)))
        silent = {
            number: now - self._silent_since.setdefault(number, now) + 2 * BEAT_S
            for number in inquiry.silent
        }
        late += self._of_silent({n: s for n, s in silent.items() if s >= LEAST_S}, look)
        return max(late, default=(0.0, None), key=lambda each: each[0])[1]

    def forget(self, number: int) -> None:
        """Forget a process's durations, so that its operations may take as long as first ones."""
        self._silent_since.pop(number, None)
        self._longest.pop(number, None)

    def replaced(self, number: int) -> None:
        """Note that a new process has taken the place of one; recorded durations are kept."""
        self._silent_since.pop(number, None)

    def _note(self, number: int, report: Report) -> None:
        longest = self._longest.setdefault(number, {})
        for kind, seconds in report.longest.items():
            longest[kind] = max(seconds, longest.get(kind, 0.0))

    @staticmethod
    def _under_way(report: Report) -> dict[str, float]:
        """Return the seconds of operations in progress that do not wait for other processes, by
        kind."""
        current = {report.kind: report.seconds} if report.kind and not report.waits else {}
        return {**report.in_threads, **current}

    def _limit(self, number: int, kind: str) -> float:
        longest = self._longest.get(number, {})
        seconds = longest.get(kind)
        if seconds is None and kind in OWN_TASKS:
            seconds = max(longest.values(), default=None)
        return self._most if seconds is None else min(self._most, max(LEAST_S, TIMES * seconds))

    def _before(self, number: int, kind: str) -> str:
        seconds = self._longest.get(number, {}).get(kind)
        return (
            "which it has not done before" if seconds is None
            else f"which took at most {seconds:.2f} s before"
        )

    def _of_silent(
        self, silent: Mapping[int, float], look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> list[tuple[float, Overdue]]:
        """Return silent processes that exceed their limit, which is shortest for stopped processes.
        A process that holds the interpreter's lock may be computing."""
        if not silent:
            return []
        looks, late = look(silent.keys()), []
        for number, seconds in silent.items():
            longest = self._longest.get(number, {}).values()
            limit = max(LEAST_S, TIMES * max(longest)) if longest else self._most
            state = looks[number].state if number in looks else "out of reach"
            if state == STOPPED:
                limit = LEAST_S
            limit = min(limit, self._most)
            if seconds + BEAT_S >= limit:
                late.append((seconds / limit, Overdue(number, f"silent for {seconds:.0f} s")))
        return late
