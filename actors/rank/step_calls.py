"""Calls of steps, as driver and ranks know them: which programs both keep, what is sent with a
call, and what comes back.

What is sent is bytes: anything else Ray pickles by its own means, for every rank anew, which takes
several times as long.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.scheduler.plan.stage import StageId

# Programs a rank keeps: one per combination of modalities seen in a step's microbatches.
MAX_PROGRAMS = 256


Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(programs: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Put ``key`` last and drop the least recently used entry beyond :data:`MAX_PROGRAMS`.

    Args:
        programs: from the least to the most recently used; changed in place.
        key: of the program that is used now.
        value: the program, or None where only its place is kept.
    """
    programs[key] = value
    programs.move_to_end(key)
    if len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)


Result = TypeVar("Result")  # what a rank reports of a step


class Waiting(Protocol):
    """Who can wait for ranks."""

    def wait(self, refs: Sequence[Any], /) -> list[Any]:
        """What their calls returned, by rank.

        Args:
            refs: of the calls.
        """
        ...


class StepHandle(Generic[Result]):
    """A submitted step. ``result()`` waits for it.

    Args:
        group: that runs it.
        refs: of the ranks' calls.
        unpack: makes a rank's result of what it sent; None where it sent the result.
    """

    def __init__(
        self, group: Waiting, refs: Sequence[Any], unpack: Callable[[Any], Result] | None = None
    ) -> None:
        self._group = group
        self._refs = refs
        self._unpack = unpack

    def result(self) -> list[Result]:
        """Every rank's result, by rank.

        Raises:
            RankFailedError: if a rank died or raised.
        """
        sent = self._group.wait(self._refs)
        return sent if self._unpack is None else list(map(self._unpack, sent))

    def forget(self) -> None:
        """Nobody asks for it any more, as it has failed, or one before it: read what there is of
        it, or Ray would print errors that nobody has read."""
        import ray  # ranks that are driven by other means have none
        from ray.exceptions import RayError

        for ref in self._refs:
            try:
                ray.get(ref, timeout=0)
            except RayError:
                continue


class CallOrder:
    """While this is entered, ranks are called: calls of several threads come in one order on all of
    them, and an interruption (Ctrl-C) waits until all have theirs. A rank with a step that another
    has not would wait for it in vain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handler: Any = None
        self._noted: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        # Only the main thread is interrupted, and only it may say by whom.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGINT)
            if callable(self._handler):
                signal.signal(signal.SIGINT, self._note)
        self._lock.acquire()

    def _note(self, *noted: Any) -> None:
        self._noted = noted

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread() and callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            noted, self._noted = self._noted, None
            if noted is not None:
                self._handler(*noted)


def pack_calls(
    key: str, meta: StepMeta, inputs: Sequence[Sequence[tuple[StageId, int, Any]]]
) -> list[tuple[Any, ...]]:
    """Arguments of each rank's call. Those that are the same for all are pickled once.

    Args:
        key: of a loaded program.
        meta: the step's metadata.
        inputs: per rank, (stage, microbatch, dict or ObjectRef of a dict).
    """
    common = pickle.dumps((key, meta), pickle.HIGHEST_PROTOCOL)
    return [
        (common, _pack_layout([row[:2] for row in rows]), *(data for *_, data in rows))
        for rows in inputs
    ]


def _pack_layout(layout: Sequence[tuple[StageId, int]]) -> bytes:
    return pickle.dumps(layout, pickle.HIGHEST_PROTOCOL) if layout else b""


def unpack_call(
    common: bytes, layout: bytes
) -> tuple[str, StepMeta, Sequence[tuple[StageId, int]]]:
    """Key, metadata, and (stage, microbatch) of every input.

    Args:
        common, layout: as of :func:`pack_calls`.
    """
    return *pickle.loads(common), pickle.loads(layout) if layout else ()


def pack_result(result: StepResult) -> bytes:
    """A rank's."""
    return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


def unpack_result(packed: bytes) -> StepResult:
    """The inverse of :func:`pack_result`."""
    return pickle.loads(packed)
