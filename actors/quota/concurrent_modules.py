"""Concurrent execution of one process's modules, each in its own thread on its own stream.

The host never waits for the device: a stream waits for the events of its work's inputs, and every
result has an event. Results equal those of the same works run one after another, regardless of
thread scheduling:

- modules share no parameters, so no two threads add to the same gradient
  (:func:`check_no_shared_parameters`);
- a thread has its caller's settings (:mod:`.concurrent_modules`);
- works that draw random numbers run one after another (:mod:`.generators`);
- on a GPU, backward operators run on the stream of their forward, issued by the module's own thread
  with that stream current (:mod:`.concurrent_modules`). Both have the same partition.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raymm.actors.quota.generators import Ticket, generator_state, seed_generators
from raymm.actors.quota.pool import QuotaStream, StreamSet
from raymm.actors.quota.work import Output, Work, tensors_in
from raymm.errors import InternalError


class Task:
    """Call that was submitted to a worker. ``done`` is set once ``result`` or ``error`` is
    available."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            assert self._call is not None  # a task runs once
            self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            # The call references tensors, and the frames of an error would keep the call alive.
            self._call = None
            self.done.set()


class Worker:
    """Daemon thread named after its module. One thread per module runs all steps, because cuBLAS
    handles and workspaces are per thread."""

    def __init__(self, module: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # The target must not reference the worker, which could otherwise never be
        # garbage-collected.
        self._thread = threading.Thread(
            target=_work, args=(self._tasks,), name=f"side-by-side-{module}", daemon=True
        )
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Task:
        task = Task(call)
        self._tasks.put(task)
        return task

    def release(self) -> None:
        """Let the thread end after its submitted tasks."""
        self._tasks.put(None)

    def close(self, timeout: float) -> bool:
        """End the thread after its submitted tasks. Return True if it ended within ``timeout``
        seconds."""
        self.release()
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # or its result would live until the next task


AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ThreadSettings:
    """Settings of a thread: :meth:`capture` them in one thread and apply them in another.

    Attributes:
        autocast: (device type, enabled, dtype).
        default_device: default device of new tensors; None if not set.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None

    @classmethod
    def capture(cls) -> ThreadSettings:
        # get_default_device() does not distinguish "not set" from "cpu", and setting the device
        # adds a function mode around every call.
        device = torch.get_default_device()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in AUTOCAST_DEVICES
            ),
            default_device=None if device == torch.device("cpu") else device,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings in the calling thread for the length of the block. Autocast does not
        cache cast weights: the cache belongs to the process, and a thread that leaves autocast
        would clear entries of another thread at an unpredictable time."""
        with ExitStack() as stack:
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            stack.callback(torch.set_autocast_cache_enabled, cached)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


# Seconds that a stage may take before its modules count as stuck.
STAGE_TIMEOUT_SECONDS = 600.0
# Seconds for an idle thread to end.
CLOSE_TIMEOUT_SECONDS = 5.0


class ConcurrentModules:
    """Threads of one process's modules, created on demand and reused from step to step.

    Args:
        timeout: seconds for issuing the works of one :meth:`run` (on a CPU, for finishing them).

    Raises:
        ValueError: the timeout is not a positive number.
    """

    def __init__(self, timeout: float = STAGE_TIMEOUT_SECONDS) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not (
            0 < timeout < math.inf
        ):
            raise ValueError(f"timeout is {timeout!r}; accepted: a positive number of seconds")
        self._timeout = timeout
        self._workers: dict[str, Worker] = {}
        # The threads end with the object, even without a call of close().
        weakref.finalize(self, _release, self._workers)
        self._running = threading.Lock()
        self._unusable: str | None = None

    def run(self, streams: StreamSet, works: Mapping[str, Work]) -> dict[str, Output]:
        """Run works concurrently, each on its module's stream of the set.

        They run after work that the calling thread has issued to its current stream. Returns when
        all works have been issued; on a CPU, when all are done. Outputs are in the order of
        ``works``.

        Raises:
            InternalError: a work raised an error, reported after all works have ended, with further
                failed modules as notes; or a work with ``draws=False`` drew random numbers.
            TimeoutError: some works did not end in time.
            ValueError: a module has no stream, or a backward has another partition than its
                forward.
            RuntimeError: called after a timeout, after :meth:`close`, or from within a work.
        """
        _check(streams, works)
        with self._exclusively():
            issued = streams.backend.current().record()
            settings = ThreadSettings.capture()
            tickets = _Tickets(self._timeout)
            tasks = {
                module: self._worker(module).submit(
                    partial(
                        _perform,
                        module,
                        work,
                        streams,
                        issued,
                        settings,
                        tickets.next(module, work),
                    )
                )
                for module, work in works.items()
            }
            self._wait(tasks, tickets)
        _raise_first({module: task.error for module, task in tasks.items()})
        tickets.check()
        return {module: task.result for module, task in tasks.items()}

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        if self._unusable is not None:
            raise RuntimeError(f"modules cannot run concurrently any more: {self._unusable}")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("modules already run concurrently: run() was called during run()")
        try:
            yield
        finally:
            self._running.release()

    def _worker(self, module: str) -> Worker:
        if module not in self._workers:
            self._workers[module] = Worker(module)
        return self._workers[module]

    def _wait(self, tasks: Mapping[str, Task], tickets: _Tickets) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            for task in tasks.values():
                task.done.wait(max(0.0, deadline - time.monotonic()))
        finally:
            # Also if the wait was interrupted.
            late = tickets.stuck([m for m, task in tasks.items() if not task.done.is_set()])
            if late:
                self._unusable = f"modules {', '.join(map(repr, late))} did not end"
        if late:
            raise TimeoutError(f"{self._unusable} within {self._timeout:g} s")

    def close(self) -> None:
        """End the threads, except stuck ones, which are daemon threads. Closing twice does
        nothing."""
        self._unusable = self._unusable or "they were closed"
        workers = self._workers.copy()
        self._workers.clear()
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for worker in workers.values():
            worker.close(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> ConcurrentModules:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_no_shared_parameters(modules: Mapping[str, nn.Module]) -> None:
    """Check that modules share no parameters or buffers. Concurrent modules would change them in
    any order. Raise a ``ValueError`` if two modules share a tensor; names it."""
    owners: dict[int, tuple[str, str]] = {}
    for module, instance in modules.items():
        named = [*instance.named_parameters(), *instance.named_buffers()]
        for name, tensor in named:
            owner, its_name = owners.setdefault(id(tensor), (module, name))
            if owner != module:
                raise ValueError(
                    f"{name!r} of module {module!r} is {its_name!r} of module {owner!r}; accepted: "
                    "concurrent modules without shared parameters and buffers"
                )


class _Tickets:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last: Ticket | None = None
        self._before: tuple[object, ...] | None = None
        self._tickets: dict[str, Ticket] = {}
        self._without: list[str] = []

    def next(self, module: str, work: Work) -> contextlib.AbstractContextManager[None]:
        if not work.draws:
            self._without.append(module)
            if self._before is None:
                self._before = generator_state()
            return contextlib.nullcontext()
        self._last = self._tickets[module] = Ticket(self._last, self._timeout)
        return self._last

    def stuck(self, late: Sequence[str]) -> tuple[str, ...]:
        """Return the unfinished modules that did not merely wait for another module's ticket."""
        begun = tuple(m for m in late if m not in self._tickets or self._tickets[m].entered)
        return begun or tuple(late)

    def check(self) -> None:
        """Raise an error if works without a ticket drew random numbers; not possible if other works
        drew some."""
        if self._last is None and self._before not in (None, generator_state()):
            raise InternalError(
                f"random numbers were drawn by one of modules {', '.join(map(repr, self._without))}"
                ", with draws=False; accepted: draws=True in its Work or DagModule (the default "
                "only for modules in training)"
            )


def _release(workers: dict[str, Worker]) -> None:
    for worker in workers.values():
        worker.release()
    workers.clear()


def _check(streams: StreamSet, works: Mapping[str, Work]) -> None:
    for module, work in works.items():
        if module not in streams.streams:
            raise ValueError(
                f"no stream for module {module!r}; accepted: modules of set {streams.name!r}: "
                f"{', '.join(streams.streams)}"
            )
        forward = work.backward_of
        partition = streams.streams[module].partition
        if forward is not None and not _same_place(forward.stream.partition, partition):
            raise ValueError(
                f"the backward of {module!r} is assigned to {partition}, but autograd runs it "
                f"where its forward ran, on {forward.stream.partition}; accepted: the same "
                "partition"
            )


def _same_place(first: Any, second: Any) -> bool:
    def place(partition: Any) -> tuple[int, int, bool]:
        return partition.first_group, partition.groups, partition.whole

    return place(first) == place(second)


def _perform(
    module: str,
    work: Work,
    streams: StreamSet,
    issued: Any,
    settings: ThreadSettings,
    ticket: contextlib.AbstractContextManager[None],
) -> Output:
    stream = streams.streams[module]
    # Take the ticket first: the module holds no partition while it waits.
    with ticket, settings.applied(), stream.use():
        stream.wait(issued)
        if work.backward_of is not None:
            stream.wait(work.backward_of.event)
        arguments = [_consume(stream, consumed) for consumed in work.consumes]
        if work.seed is not None:
            seed_generators(work.seed)
        value = work.run(*arguments)
        return Output(module, value, stream, stream.record(), streams.backend)


def _consume(stream: QuotaStream, consumed: Any) -> Any:
    if isinstance(consumed, Output):
        stream.wait(consumed.event)
        consumed = consumed.value
    stream.keep(tensors_in(consumed))
    return consumed


def _raise_first(errors: Mapping[str, BaseException | None]) -> None:
    failed = {module: error for module, error in errors.items() if error is not None}
    if not failed:
        return
    (module, cause), *further_failures = failed.items()
    error = InternalError(f"module {module!r} failed: {_said(cause)}")
    for further_module, further_cause in further_failures:
        error.add_note(f"module {further_module!r} failed as well: {_said(further_cause)}")
    raise error from cause


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
