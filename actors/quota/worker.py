"""A module's thread: it runs one call at a time, for as long as training lasts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Task:
    """A call that a worker was given.

    Attributes:
        done: set when it has ended; then ``result`` or ``error`` hold how.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call. Never raises."""
        try:
            assert self._call is not None  # a task runs once
            self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            # The call holds tensors and, by its frames, the error would hold them as well.
            self._call = None
            self.done.set()


class Worker:
    """A thread by the name of its module. It does not keep the process from ending.

    One thread per module for all steps: cuBLAS handles and workspaces are per thread.
    """

    def __init__(self, module: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Its target must not hold the worker, or nobody could ever see that it is not used.
        self._thread = threading.Thread(
            target=_work, args=(self._tasks,), name=f"side-by-side-{module}", daemon=True
        )
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Task:
        task = Task(call)
        self._tasks.put(task)
        return task

    def release(self) -> None:
        """Let the thread end once it has done what it was given."""
        self._tasks.put(None)

    def close(self, timeout: float) -> bool:
        """End the thread once it has done what it was given; whether it ended in time
        (seconds)."""
        self.release()
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # or its result would live until the next one comes
