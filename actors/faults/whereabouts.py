"""Where a process is in its work, for others to ask while it works.

A rank enters every instruction that it begins, in under a microsecond; a second thread of its actor
answers, also whether its stack stands in an operation between processes
(:mod:`raymm.kernels.collectives.waiting`).
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from raymm.actors.faults.failure_kind import carry_kind
from raymm.actors.faults.lost_processes import reporting_lost_processes
from raymm.kernels.collectives.waiting import is_waiting

Method = TypeVar("Method", bound=Callable[..., Any])


class Report(NamedTuple):
    """What a process says of itself.

    Attributes:
        doing: an instruction of a step, or what else it was asked to do; empty if nothing.
        seconds: since when.
        waits: whether it is within an operation between processes.
        gave_up: if it does nothing because its last task failed, in what and after how long.
        kind: of what it does: what is alike takes alike long.
        longest: seconds that what it has done took, by kind, the longest of each.
        in_threads: what other threads of it do, and since when.
    """

    doing: str
    seconds: float
    waits: bool
    gave_up: str = ""
    kind: str = ""
    longest: Mapping[str, float] = MappingProxyType({})
    in_threads: Mapping[str, float] = MappingProxyType({})

    def __str__(self) -> str:
        if not self.doing:
            return f"gave up in {self.gave_up}" if self.gave_up else "has no work"
        verb = "has waited for others in" if self.waits else "has been in"
        return f"{verb} {self.doing} for {self.seconds:.1f} s"


class Whereabouts:
    """What a process is doing. One thread enters, any thread may ask.

    Args:
        describe: returns the text of an instruction.
    """

    def __init__(self, describe: Callable[[Any], str] = str) -> None:
        self._said = describe
        self._thread = threading.get_ident()
        self._now: tuple[Any, float] = ("", time.monotonic())
        self._longest: dict[Any, float] = {"": math.inf}  # of doing nothing, nobody asks
        self._in_threads: dict[str, float] = {}
        self._gave_up = ""

    def enter(self, instruction: Any) -> None:
        """The next instruction begins. Takes less than a microsecond."""
        now = time.monotonic()
        before, since = self._now
        self._now = (instruction, now)
        kind = _kind(before)
        if now - since > self._longest.get(kind, -1.0):
            self._longest[kind] = now - since

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
        except BaseException as error:
            carry_kind(error)
            self._gave_up = f"{self._doing()} after {time.monotonic() - self._now[1]:.1f} s"
            raise
        finally:
            self.enter("")

    @contextmanager
    def in_thread(self, task: str) -> Iterator[None]:
        """A task of another thread for the length of a block.

        Args:
            task: its name.
        """
        start = self._in_threads[task] = time.monotonic()
        try:
            yield
        finally:
            del self._in_threads[task]
            self._longest[task] = max(time.monotonic() - start, self._longest.get(task, 0.0))

    def report(self) -> Report:
        """What the process does now."""
        instruction, since = self._now
        now = time.monotonic()
        return Report(
            self._doing(), now - since, self._waits(), self._gave_up, _in_words(_kind(instruction)),
            {_in_words(kind): seconds for kind, seconds in self._longest.copy().items() if kind},
            {task: now - start for task, start in self._in_threads.copy().items()},
        )

    def _doing(self) -> str:
        now = self._now[0]
        return now if isinstance(now, str) else self._said(now)

    def _waits(self) -> bool:
        return is_waiting(sys._current_frames().get(self._thread))


def _kind(instruction: Any) -> Any:
    """Key under which the longest duration of an instruction or a task is kept. Stages have keys of
    their own: the first forward of each may compile, whatever others have run before."""
    op = getattr(instruction, "op", None)
    return instruction if op is None else (op, getattr(instruction, "stage", ""))


def _in_words(kind: Any) -> str:
    return f"{kind[0]} {kind[1]}".strip() if type(kind) is tuple else str(kind)


# Tasks that run none of the user's code and wait for nothing but other processes: short, once it is
# known how long this process takes for anything.
OWN_TASKS = frozenset({
    "meeting the other ranks", "meeting the other ranks again", "connecting", "leaving a step",
    "copying a snapshot", "going back to a snapshot",
})


def task(name: str) -> Callable[[Method], Method]:
    """For methods of an object with ``whereabouts``: what it says while they run."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.whereabouts.during(name):
                return method(self, *args, **kwargs)

        return cast(Method, run)

    return decorated
