"""Calls that run steps: the programs that driver and ranks keep, packed arguments and packed
results.

Both are pickled to bytes here, because Ray's serialization takes several times as long per rank.
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

# Programs that a rank keeps: one per combination of modalities in a step's microbatches.
MAX_PROGRAMS = 256


Key = TypeVar("Key")
Value = TypeVar("Value")


def keep_recent(programs: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Mark ``key`` as most recently used and evict the least recently used entry beyond
    :data:`MAX_PROGRAMS`. ``programs`` is changed in place; ``value`` is None to keep only the
    key."""
    programs[key] = value
    programs.move_to_end(key)
    if len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)


Result = TypeVar("Result")  # result of a step on one rank


class Waiting(Protocol):
    """Object that can wait for ranks."""

    def wait(self, refs: Sequence[Any], /) -> list[Any]:
        """Wait for calls, and return their results by rank."""
        ...


class StepHandle(Generic[Result]):
    """Submitted step. ``unpack`` converts what a rank returned to its result."""

    def __init__(
        self, group: Waiting, refs: Sequence[Any], unpack: Callable[[Any], Result] | None = None
    ) -> None:
        self._group = group
        self._refs = refs
        self._unpack = unpack

    def result(self) -> list[Result]:
        """Wait for the step, and return every rank's result by rank.

        Raises:
            RankFailedError: a rank died or raised an error.
        """
        sent = self._group.wait(self._refs)
        return sent if self._unpack is None else list(map(self._unpack, sent))

    def forget(self) -> None:
        """Consume the results of a step after a failure. Ray would otherwise print unread
        errors."""
        import ray  # ranks that run without Ray do not need it
        from ray.exceptions import RayError

        for ref in self._refs:
            try:
                ray.get(ref, timeout=0)
            except RayError:
                continue


class CallOrder:
    """Context manager for calling all ranks.

    Calls of several threads reach all ranks in the same order, and an interrupt (Ctrl-C) is delayed
    until every rank has received its call. A rank with a step that another rank lacks would hang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handler: Any = None
        self._noted: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        # Only the main thread receives signals and may set handlers.
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
    """Return the arguments of each rank's call; arguments common to all ranks are pickled once.

    Args:
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
    """Return the key, the metadata, and (stage, microbatch) of every input."""
    return *pickle.loads(common), pickle.loads(layout) if layout else ()


def pack_result(result: StepResult) -> bytes:
    return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


def unpack_result(packed: bytes) -> StepResult:
    return pickle.loads(packed)
