"""Where a process is in its work, for others to ask while it works.

A rank enters every instruction that it begins, in under a microsecond; a second thread of its actor
answers, also whether its stack stands in an operation between processes
(:mod:`raymm.kernels.collectives.waiting`).
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from raymm.actors.faults.lost_processes import reporting_lost_processes
from raymm.kernels.collectives.waiting import is_communication

Method = TypeVar("Method", bound=Callable[..., Any])


class Report(NamedTuple):
    """What a process says of itself.

    Attributes:
        doing: an instruction of a step, or what else it was asked to do; empty if nothing.
        seconds: since when.
        waits: whether it is within an operation between processes.
        gave_up: if it does nothing because its last task failed, in what and after how long.
    """

    doing: str
    seconds: float
    waits: bool
    gave_up: str = ""

    def __str__(self) -> str:
        if not self.doing:
            return f"gave up in {self.gave_up}" if self.gave_up else "has no work"
        verb = "waits for others in" if self.waits else "is in"
        return f"{verb} {self.doing} since {self.seconds:.1f} s"


class Whereabouts:
    """What a process is doing. One thread enters, any thread may ask.

    Args:
        said: an instruction in words.
    """

    def __init__(self, describe: Callable[[Any], str] = str) -> None:
        self._said = describe
        self._thread = threading.get_ident()
        self._now: tuple[Any, float] = ("", time.monotonic())
        self._gave_up = ""

    def enter(self, instruction: Any) -> None:
        """The next instruction begins. Takes less than a microsecond."""
        self._now = (instruction, time.monotonic())

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """A task for the length of a block, whose instructions may be entered in it.

        Raises:
            ChannelError: an operation between processes failed; names the instruction.
            RuntimeError: code of the user's called ``sys.exit``, which Ray would take for the end
                of the process.
        """
        self._thread, self._gave_up = threading.get_ident(), ""
        self.enter(task)
        try:
            with reporting_lost_processes(self._doing):
                try:
                    yield
                except SystemExit as end:
                    raise RuntimeError(
                        f"sys.exit({end.code!r}) was called in {self._doing()}"
                    ) from end
        except BaseException:
            self._gave_up = f"{self._doing()} after {time.monotonic() - self._now[1]:.1f} s"
            raise
        finally:
            self.enter("")

    def report(self) -> Report:
        """What the process does now."""
        _, since = self._now
        return Report(self._doing(), time.monotonic() - since, self._waits(), self._gave_up)

    def _doing(self) -> str:
        now = self._now[0]
        return now if isinstance(now, str) else self._said(now)

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._thread)
        return frame is not None and is_communication(frame.f_code)


def task(name: str) -> Callable[[Method], Method]:
    """For methods of an object with ``whereabouts``: what it says while they run."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.whereabouts.during(name):
                return method(self, *args, **kwargs)

        return cast(Method, run)

    return decorated
