"""Thread of a module, which runs one call at a time for the duration of training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


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
