"""Requests to end a run after the current step, made by signals or by other code.

The run checks for a request between steps, finishes the current step, saves and ends. Before the
training loop starts, and while it waits for data, a signal raises ``KeyboardInterrupt``, the only
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

# Seconds in which a repeated signal counts as the same request: `timeout`, `make` and terminals
# send a signal both to a process and to its process group.
SAME_SIGNAL_S = 1.0
# Seconds between two checks for a request during a pause.
_LOOK_S = 0.1
# Environment variable and default value of the seconds between SIGTERM and SIGKILL of `ray job
# stop` (ray/dashboard/modules/job/job_supervisor.py). Ray reads the variable from the environment
# of the job or of the cluster's nodes.
JOB_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
JOB_STOP_DEFAULT_S = "3"
# Set by Ray in the entrypoint process of a job.
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Item = TypeVar("Item")


@dataclass(frozen=True)
class StopReason:
    """Reason for a stop request.

    Attributes:
        why: short name, such as ``"SIGTERM"``.
        number: number of the signal; None for other reasons.
        cause: interruption that the run resumes from in another attempt; None to end the run.
    """

    why: str
    number: int | None = None
    cause: Cause | None = None

    @property
    def rank(self) -> int:
        """Priority of the reason: a signal over other requests to end, and these over requests to
        leave."""
        if self.cause is not None:
            return 0
        return 1 if self.number is None else 2


class StopRequest:
    """Request to end a run, or to leave its nodes.

    Outside of :meth:`deferred`, a signal raises KeyboardInterrupt immediately, like Ctrl-C. Inside,
    the first signal only records the request, and a second signal raises.

    Attributes:
        at_once: True after a second signal, which ends the run without finishing the current step.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.at_once = False
        self._deferred = False
        self._finishes = False  # True within deferred(), also while an item is awaited
        self._signalled_at: float | None = None
        self._before: dict[int, Any] = {}

    def ask(self, reason: StopReason) -> None:
        """Request a stop, from any thread. A reason with a higher rank replaces the current one."""
        if self.reason is None or reason.rank > self.reason.rank:
            self.reason = reason

    @contextlib.contextmanager
    def asking_after(self, seconds: float | None) -> Iterator[None]:
        """Request a stop after some seconds (``run.max_seconds``) unless the block ends earlier;
        None for no limit."""
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
        """Raise KeyboardInterrupt if the run should end. For places where nothing needs to be
        finished."""
        if self.reason is not None and self.reason.cause is None:
            raise KeyboardInterrupt

    def pause(self, seconds: float) -> None:
        """Sleep for some seconds, or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while self.reason is None and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, _LOOK_S))

    def withdraw(self) -> None:
        """Clear a request to leave, because the next attempt has left the nodes."""
        if self.reason is not None and self.reason.cause is not None:
            self.reason = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals as stop requests within the block, and restore the previous handlers
        afterwards.

        Works in the main thread only; elsewhere signals keep their effect. Ignored signals stay
        ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._before[number] = handler
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record the first signal within the block instead of raising."""
        before, self._deferred, self._finishes = (self._deferred, self._finishes), True, True
        try:
            yield
        finally:
            self._deferred, self._finishes = before

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        was_deferred, self._deferred = self._deferred, False
        try:
            yield
        finally:
            self._deferred = was_deferred

    def until_asked(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items until they end or a stop is requested. A signal interrupts the wait for an
        item."""
        iterator = iter(items)
        try:
            while self.reason is None:
                try:
                    with self._interruptible():
                        if self.reason is not None:  # a signal arrived just before this block
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
            if self._finishes:
                _say(f"{name}: finishing and saving the current step; a second signal ends the "
                     f"run immediately{_job_note()}")  # fmt: skip
            if self._deferred:
                return
        elif now - self._signalled_at < SAME_SIGNAL_S:
            return
        else:
            self.at_once = True
            self._restore()  # later signals reach the previous handlers
        # KeyboardInterrupt is the only exception that Ray's waits let through from a handler.
        raise KeyboardInterrupt

    def error(self, text: str) -> BaseException:
        """Return the exception that ends the program after a signal: SystemExit with code 143 after
        SIGTERM, else KeyboardInterrupt. ``text`` describes what was saved."""
        if self.reason is None or self.reason.number != signal.SIGTERM:
            return KeyboardInterrupt(text)
        end = SystemExit(text)
        end.code = 128 + signal.SIGTERM
        return end


def _say(text: str) -> None:
    # The console is not safe in a signal handler: the interrupted code may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def in_ray_job() -> bool:
    """Return True if this process is the entrypoint of a Ray job."""
    return _JOB_VARIABLE in os.environ


def _job_note() -> str:
    if not in_ray_job():
        return ""
    seconds = os.environ.get(JOB_STOP_VARIABLE, JOB_STOP_DEFAULT_S)
    return f". `ray job stop` kills after {seconds} s ({JOB_STOP_VARIABLE})"


def job_stop_note() -> str | None:
    """Return a note about the timeout of ``ray job stop``; None outside of a Ray job or if the
    variable is set."""
    if not in_ray_job() or JOB_STOP_VARIABLE in os.environ:
        return None
    return (
        f"note: `ray job stop` kills a job after {JOB_STOP_DEFAULT_S} s, which may be too short "
        "for a step and its checkpoint; `ray job submit --runtime-env-json "
        f"'{{\"env_vars\": {{\"{JOB_STOP_VARIABLE}\": \"300\"}}}}'` gives more"
    )
