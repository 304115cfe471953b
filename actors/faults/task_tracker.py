"""Current operation of a process, for queries by other processes while it works.

A rank records every instruction that it starts, in under a microsecond. A second thread of its
actor answers queries, and reports if the working thread's stack is in a communication operation
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
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from raymm.actors.faults.failure_kind import carry_kind
from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import is_communication, is_waiting

Method = TypeVar("Method", bound=Callable[..., Any])


class Report(NamedTuple):
    """Report of a process on its current operation.

    Attributes:
        doing: instruction of a step or name of another task; empty if idle.
        waits: True if the process is in a communication operation.
        gave_up: if the process is idle because its last task failed, where and after how long.
        kind: operation type; the key under which the longest duration so far is stored.
        longest: longest duration in seconds of finished operations, by kind.
        in_threads: seconds so far of tasks in other threads, by task.
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


class TaskTracker:
    """Record of what a process is doing. One thread writes it; any thread may read it."""

    def __init__(self, describe: Callable[[Any], str] = str) -> None:
        self._said = describe
        self._thread = threading.get_ident()
        self._now: tuple[Any, float] = ("", time.monotonic())
        self._longest: dict[Any, float] = {"": math.inf}  # idle time is not measured
        self._in_threads: dict[str, float] = {}
        self._gave_up = ""

    def enter(self, instruction: Any) -> None:
        """Record that the next instruction starts. Takes less than a microsecond."""
        now = time.monotonic()
        previous, since = self._now
        self._now = (instruction, now)
        kind = _kind(previous)
        if now - since > self._longest.get(kind, -1.0):
            self._longest[kind] = now - since

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """Record a task for the length of the block. Instructions may be entered within it. Raise a
        ``ChannelError`` if a communication operation failed; names the instruction. Raise a
        ``RuntimeError`` if user code called ``sys.exit``, which Ray would treat as the end of the
        process."""
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
        """Record a task of another thread for the length of the block."""
        start = self._in_threads[task] = time.monotonic()
        try:
            yield
        finally:
            del self._in_threads[task]
            self._longest[task] = max(time.monotonic() - start, self._longest.get(task, 0.0))

    def report(self) -> Report:
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
    """Return the key of an instruction's longest duration. Each stage has its own keys, because its
    first forward may compile."""
    op = getattr(instruction, "op", None)
    return instruction if op is None else (op, getattr(instruction, "stage", ""))


def _in_words(kind: Any) -> str:
    return f"{kind[0]} {kind[1]}".strip() if type(kind) is tuple else str(kind)


# Tasks that run no user code and wait for nothing but other processes. They are short, so the
# longest other operation of a process limits them even before they have run once.
OWN_TASKS = frozenset({
    "meeting the other ranks", "meeting the other ranks again", "connecting", "leaving a step",
    "copying a snapshot", "going back to a snapshot",
})


def task(name: str) -> Callable[[Method], Method]:
    """Decorate methods of an object with ``task_tracker``: record a task while the method runs."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.task_tracker.during(name):
                return method(self, *args, **kwargs)

        return cast(Method, run)

    return decorated


@contextmanager
def reporting_lost_processes(what: Callable[[], str]) -> Iterator[None]:
    """Convert errors of communication (a lost or late peer) to :class:`ChannelError`, after which
    the driver looks for the process at fault. The location where an error was raised decides, so
    errors of modules are unchanged, whatever their text."""
    try:
        yield
    except RuntimeError as error:
        if not _of_communication(error):
            raise
        raise ChannelError(f"{what()}: {error}") from error


def _of_communication(error: RuntimeError) -> bool:
    """Return True for torch's communication errors, and for bare RuntimeErrors that were raised in
    a communication function, as backends do."""
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and is_communication(frames[-1].f_code)
