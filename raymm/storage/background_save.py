"""Checkpoint that is written and committed while steps continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raymm.errors import InternalError

# Seconds that an abandoned save may take to end.
GIVE_UP_S = 5.0


class Saved(NamedTuple):
    """Committed checkpoint.

    Attributes:
        seconds: from the copy of the state until the commit.
    """

    step: int
    folder: Path | str
    seconds: float


class BackgroundSave:
    """Thread that writes one checkpoint.

    Args:
        work: writes and commits the checkpoint and returns its location. Receives a function to
            call before irreversible actions; it raises once the save was abandoned.
    """

    def __init__(self, step: int, work: Callable[[Callable[[], None]], Path | str]) -> None:
        self.step = step
        self._work = work
        self._began = time.perf_counter()
        self._saved: Saved | None = None
        self._error: Exception | None = None
        self._abandoned = threading.Event()
        # A driver that ends with an error must not wait for a hanging file system.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if :meth:`result` returns immediately."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for at most some seconds. Return True if the save has ended."""
        self._thread.join(seconds)
        return self.ended

    def result(self) -> Saved:
        """Wait for the save. Raises what the save raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def abandon(self) -> None:
        """Prevent the commit, unless it is in progress."""
        self._abandoned.set()
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        try:
            folder = self._work(self._check)
        except Exception as error:  # raised again by result()
            self._error = error
            return
        self._saved = Saved(self.step, folder, time.perf_counter() - self._began)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise InternalError(f"the checkpoint of step {self.step} was abandoned")
