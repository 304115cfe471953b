"""What a search tells while it runs, and what ends it early: a time limit, or Ctrl-C.

A search asks :meth:`SearchControl.should_stop` often. It goes on with what it has once that is
true, so that the best plan so far is what comes of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Seconds between two lines.
EVERY = 3.0


@dataclass(frozen=True)
class SearchState:
    """How far a search is.

    Attributes:
        subject: what is searched.
        tried: plans that were evaluated.
        best: seconds of a step of the best plan so far; None: there is none yet.
        limit: what limits that plan.
        elapsed: seconds since the search began.
    """

    subject: str
    tried: int
    best: float | None
    limit: str
    elapsed: float

    @property
    def line(self) -> str:
        """For a person."""
        best = "none fits yet" if self.best is None else f"best {self.best:.4g} s, {self.limit}"
        return f"{self.elapsed:.0f} s: searching {self.subject}; {self.tried} plans tried, {best}"


class SearchControl:
    """One search's progress and end. It begins when this is made.

    Args:
        time_limit: seconds after which the search ends with the best so far, or else its first
            plan; None: none.
        say: takes a line every :data:`EVERY` seconds; None: nobody listens.
        clock: seconds.
    """

    def __init__(
        self,
        time_limit: float | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._time_limit, self._say, self._clock = time_limit, say, clock
        self._began = self._spoke = clock()
        self._subject, self._tried = "plans", 0
        self._best: float | None = None
        self._limit: Callable[[], str] = str
        self._interrupted = False

    def begin(self) -> None:
        """Plans so far do not count any more: they turned out not to run. A search that was to end
        already goes on to its next plan."""
        self._best = None

    def searching(self, subject: str) -> None:
        """What is searched from now on."""
        self._subject = subject

    def tried(self) -> None:
        """One more plan was evaluated."""
        self._tried += 1

    def fits(self, seconds: float, limit: Callable[[], str]) -> None:
        """A plan that fits takes so long.

        Args:
            seconds: of a step.
            limit: what limits it; asked when a line is printed.
        """
        if self._best is None or seconds < self._best:
            self._best, self._limit = seconds, limit

    @property
    def state(self) -> SearchState:
        """Now."""
        return SearchState(
            self._subject, self._tried, self._best, self._limit(), self._clock() - self._began
        )

    @property
    def stopped(self) -> str | None:
        """Why the search is to end before it is done, if it is."""
        if self._interrupted:
            return "Ctrl-C"
        if self._time_limit is not None and self._clock() - self._began >= self._time_limit:
            return f"the time limit of {self._time_limit:g} s"
        return None

    def should_stop(self) -> bool:
        """Whether the search is to end with what it has; not before it has a plan. Now and then it
        says how far it is."""
        now = self._clock()
        if self._say is not None and now - self._spoke >= EVERY:
            self._spoke = now
            self._say(self.state.line)
        return self._best is not None and self.stopped is not None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where a Ctrl-C ends the search with the best so far; one before there is a plan, or a
        second one, ends the program. Signals reach the main thread only; in others nothing
        changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: object) -> None:
            if self._best is None or self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
