"""Progress reports and early end (time limit or Ctrl-C) of a search.

A search polls :meth:`SearchControl.should_stop`. Once that returns True, the search ends and
returns the best plan so far.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raymm.plural import plural

# Seconds before the first progress line, and between two lines.
FIRST, EVERY = 3.0, 8.0


@dataclass(frozen=True)
class SearchState:
    """Progress of a search.

    Attributes:
        subject: kind of plans that is being searched.
        best: step time of the best plan so far, in seconds; None before the first one.
        limit: text that says what limits the best plan.
        elapsed: seconds since the search began.
    """

    subject: str
    tried: int
    best: float | None
    limit: str
    elapsed: float

    @property
    def line(self) -> str:
        best = "none fits yet" if self.best is None else f"best {self.best:.4g} s, {self.limit}"
        done = f"{plural(self.tried, 'plan')} tried, {best}" if self.tried else "no plan tried yet"
        return f"{self.elapsed:.0f} s: searching {self.subject}; {done}"


class SearchControl:
    """Progress and end of one search, which starts when this object is created.

    Args:
        time_limit: seconds after which the search ends with the best plan so far, or else with its
            first plan. None means no limit.
        say: called with a progress line every :data:`EVERY` seconds.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        time_limit: float | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._time_limit, self._say, self._clock = time_limit, say, clock
        self._began = clock()
        self._spoke = self._began + FIRST - EVERY
        self._subject, self._tried = "plans", 0
        self._best: float | None = None
        self._limit: Callable[[], str] = str
        self._interrupted = False

    def begin(self) -> None:
        """Forget the best plan so far because it turned out not to run. A search that was about to
        end continues until it finds another plan."""
        self._best = None

    def searching(self, subject: str) -> None:
        self._subject = subject

    def tried(self) -> None:
        self._tried += 1

    def fits(self, seconds: float, limit: Callable[[], str]) -> None:
        """Record a plan that fits in memory, with its step time in seconds. ``limit`` returns the
        text that says what limits the plan, and is called when a line is printed."""
        if self._best is None or seconds < self._best:
            self._best, self._limit = seconds, limit

    @property
    def state(self) -> SearchState:
        return SearchState(
            self._subject, self._tried, self._best, self._limit(), self._clock() - self._began
        )

    @property
    def stopped(self) -> str | None:
        """Reason to end the search early, or None."""
        if self._interrupted:
            return "Ctrl-C"
        if self._time_limit is not None and self._clock() - self._began >= self._time_limit:
            return f"the time limit of {self._time_limit:g} s"
        return None

    def should_stop(self) -> bool:
        """Return True if the search must end with the best plan so far; False as long as there is
        none. Also report progress every :data:`EVERY` seconds."""
        now = self._clock()
        if self._say is not None and now - self._spoke >= EVERY:
            self._spoke = now
            self._say(self.state.line)
        return self._best is not None and self.stopped is not None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C end the search with the best plan so far. A Ctrl-C before the first plan, or a
        second one, ends the program. Other threads than the main thread receive no signals, so
        there this has no effect."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: object) -> None:
            if self._best is None or self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
