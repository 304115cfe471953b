"""Which process takes too long: what it says of itself, against what it has taken before.

A process hangs where what it does takes five times as long as the longest of that kind so far, and
ten seconds at least. Neighbours that wait for it do not hang. What a process has never done before
(a first forward may compile for minutes) may take as long as one may wait for another; so may what
was taken for a hang once: then it is known whether it was one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Look
from raymm.actors.faults.whereabouts import OWN_TASKS, Report

# Seconds that anything may take: a paused machine, a page that is swapped in, a disk that is slow.
LEAST_S = 10.0
# What is alike may take so many times as long as the longest before.
TIMES = 5.0
# Seconds between two looks: who is over its limit is known when that is reached.
BEAT_S = 1.0
STOPPED = "stopped by a signal"


class Overdue(NamedTuple):
    """A process that takes too long: its number, and why that is too long, in words."""

    number: int
    why: str


class Heartbeats:
    """What some processes have said of themselves so far.

    Args:
        patience: seconds that anything may take at most.
    """

    def __init__(self, patience: float) -> None:
        # Whoever waits for a process says so, if it is there when that is over.
        self._most = patience + 2 * BEAT_S
        self._longest: dict[int, dict[str, float]] = {}
        self._silent_since: dict[int, float] = {}

    def overdue(
        self, inquiry: Inquiry, now: float, look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> Overdue | None:
        """Note what processes say, and look who takes too long; of several, the one that is
        furthest over its limit.

        Args:
            inquiry: what they say; whoever is not there yet is not in it.
            now: in seconds.
            look: how they look from outside, by number.
        """
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
        """Another process comes in the place of one; or what it did may take longer after all: it
        may take its time for it.

        Args:
            number: its number.
        """
        self._silent_since.pop(number, None)
        self._longest.pop(number, None)

    def replaced(self, number: int) -> None:
        """Another process has come in the place of one, which takes as long for what it does.

        Args:
            number: its number.
        """
        self._silent_since.pop(number, None)

    def _note(self, number: int, report: Report) -> None:
        longest = self._longest.setdefault(number, {})
        for kind, seconds in report.longest.items():
            longest[kind] = max(seconds, longest.get(kind, 0.0))

    @staticmethod
    def _under_way(report: Report) -> dict[str, float]:
        """Seconds of what is its own."""
        own = {report.kind: report.seconds} if report.kind and not report.waits else {}
        return {**report.in_threads, **own}

    def _limit(self, number: int, kind: str) -> float:
        longest = self._longest.get(number, {})
        before = longest.get(kind)
        if before is None and kind in OWN_TASKS:
            before = max(longest.values(), default=None)
        return self._most if before is None else min(self._most, max(LEAST_S, TIMES * before))

    def _before(self, number: int, kind: str) -> str:
        before = self._longest.get(number, {}).get(kind)
        return (
            "which it has not done before" if before is None
            else f"which took at most {before:.2f} s before"
        )

    def _of_silent(
        self, silent: Mapping[int, float], look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> list[tuple[float, Overdue]]:
        """One that is stopped hangs; one that holds the interpreter's lock may be at work."""
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
