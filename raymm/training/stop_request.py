"""A wish that a run ends after the step under way: made by a signal, or by whatever else may have a
reason to. The run looks for it between steps, finishes what it does, saves, and ends.
Until its loop begins, and while it waits for data, a signal raises ``KeyboardInterrupt``: the one
exception that Ray's waits let through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from raymm.recovery.failure_policy import Cause

# How long after a signal the same one is taken for the very same wish: `timeout`, `make` and
# terminals send it to a process and to its process group.
SAME_SIGNAL_S = 1.0
# Seconds between two looks in a pause.
_LOOK_S = 0.1
# `ray job stop` kills after so long (ray/dashboard/modules/job/job_supervisor.py). It reads the
# variable in the job's own environment, or in that of the cluster's nodes.
JOB_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
JOB_STOP_DEFAULT_S = "3"
# Set by Ray in the process that a job is.
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Item = TypeVar("Item")


@dataclass(frozen=True)
class StopReason:
    """Why a run is to end.

    Attributes:
        why: in a word or two, ``"SIGTERM"``.
        number: of the signal; None if it was something else.
        cause: of what another attempt of the run may not meet: it leaves, and goes on. None: it
            ends.
    """

    why: str
    number: int | None = None
    cause: Cause | None = None

    @property
    def rank(self) -> int:
        """Of two reasons, the one with the higher rank counts."""
        if self.cause is not None:
            return 0
        return 1 if self.number is None else 2


class StopRequest:
    """Whether a run is asked to end.

    A signal ends what is under way at once, as Ctrl-C does anywhere, until :meth:`deferred` says
    that there is something to finish; a second signal does so always.

    Attributes:
        reason: why; None as long as nobody has asked.
        at_once: whether a signal ended, or is to end, what was under way.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.at_once = False
        self._deferred = False
        self._signalled_at: float | None = None
        self._before: dict[int, Any] = {}

    def ask(self, reason: StopReason) -> None:
        """Ask from any thread. What is under way is finished. A signal comes before others who want
        it to end, and these before who wants it to leave; else the first counts."""
        if self.reason is None or reason.rank > self.reason.rank:
            self.reason = reason

    @contextlib.contextmanager
    def asking_after(self, seconds: float | None) -> Iterator[None]:
        """For the length of a block, its time is limited (``run.max_seconds``); None: it is not."""
        if seconds is None:
            yield
            return
        reason = StopReason(f"run.max_seconds ({seconds:g})")
        timer = threading.Timer(seconds, self.ask, [reason])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def check(self) -> None:
        """Where nothing is to be finished.

        Raises:
            KeyboardInterrupt: somebody wants the run to end.
        """
        if self.reason is not None and self.reason.cause is None:
            raise KeyboardInterrupt

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the run is asked to end."""
        deadline = time.monotonic() + seconds
        while self.reason is None and (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(rest, _LOOK_S))

    def withdraw(self) -> None:
        """Another attempt begins: whoever wanted the one before to leave has what it wanted."""
        if self.reason is not None and self.reason.cause is not None:
            self.reason = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals ask, for the length of a block; in the main thread, elsewhere they do what they
        do. Those that are ignored stay so. Afterwards handlers are what they were."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, a first signal only asks."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        before, self._deferred = self._deferred, False
        try:
            yield
        finally:
            self._deferred = before

    def until_asked(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items, until there are no more or somebody asks; a signal ends the wait for one."""
        iterator = iter(items)
        try:
            while self.reason is None:
                try:
                    with self._interruptible():
                        if self.reason is not None:  # a signal came just before
                            return
                        item = next(iterator)
                except StopIteration:
                    return
                except KeyboardInterrupt:
                    if self.reason is None or self.at_once:
                        raise
                    return
                yield item
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _on_signal(self, number: int, frame: Any) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self.ask(StopReason(name, number))
            if self._deferred:
                _say(f"{name}: finishing and saving the current step; a second signal ends the "
                     f"run immediately{_job_note()}")  # fmt: skip
                return
        elif now - self._signalled_at < SAME_SIGNAL_S:
            return
        else:
            self.at_once = True
            self._restore()  # what comes now has the last word
        # Of what a handler raises Ray's waits let through this, and nothing but this.
        raise KeyboardInterrupt

    def error(self, text: str) -> BaseException:
        """What ends the program of a run that a signal ended; ``text`` says what was saved."""
        if self.reason is None or self.reason.number != signal.SIGTERM:
            return KeyboardInterrupt(text)
        end = SystemExit(text)
        end.code = 128 + signal.SIGTERM
        return end


def _say(text: str) -> None:
    # Not through the console: a handler runs in the middle of anything, its locks included.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def in_ray_job() -> bool:
    """Whether this process is the entrypoint of a Ray job."""
    return _JOB_VARIABLE in os.environ


def _job_note() -> str:
    if not in_ray_job():
        return ""
    seconds = os.environ.get(JOB_STOP_VARIABLE, JOB_STOP_DEFAULT_S)
    return f". `ray job stop` kills after {seconds} s ({JOB_STOP_VARIABLE})"


def job_stop_note() -> str | None:
    """What to know of ``ray job stop`` before it is needed; None outside of a Ray job, or if the
    variable is set."""
    if not in_ray_job() or JOB_STOP_VARIABLE in os.environ:
        return None
    return (
        f"note: `ray job stop` kills a job after {JOB_STOP_DEFAULT_S} s, which may be too short "
        "for a step and its checkpoint; `ray job submit --runtime-env-json "
        f"'{{\"env_vars\": {{\"{JOB_STOP_VARIABLE}\": \"300\"}}}}'` gives more"
    )
