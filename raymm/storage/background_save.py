"""A checkpoint that is written and committed while steps go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raymm.errors import InternalError

# Seconds that a save that is given up may take to notice.
GIVE_UP_S = 5.0


class Saved(NamedTuple):
    """A checkpoint that is committed.

    Attributes:
        step: after which its state was.
        folder: where it is.
        seconds: from the copy of the state until it was committed.
    """

    step: int
    folder: Path | str
    seconds: float


class BackgroundSave:
    """One checkpoint on its way to the storage, in a thread of its own.

    Args:
        step: of the state that was copied.
        work: writes and commits it; returns where. Is given what raises once nobody waits for it
            any more, to be called before what cannot be taken back.
    """

    def __init__(
        self, step: int, work: Callable[[Callable[[], None]], Path | str]
    ) -> None:
        self.step = step
        self._work = work
        self._began = time.perf_counter()
        self._saved: Saved | None = None
        self._error: Exception | None = None
        self._abandoned = threading.Event()
        # A driver that ends by an error must not wait for a file system that hangs.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for it, at most so long; whether it has ended.

        Args:
            seconds: how long.
        """
        self._thread.join(seconds)
        return self.ended

    def result(self) -> Saved:
        """Wait for it.

        Raises:
            Exception: what went wrong.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def abandon(self) -> None:
        """It is not to be committed any more, unless it is being just now."""
        self._abandoned.set()
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        try:
            folder = self._work(self._check)
        except Exception as error:  # raised again where somebody waits for it
            self._error = error
            return
        self._saved = Saved(self.step, folder, time.perf_counter() - self._began)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise InternalError(f"the checkpoint of step {self.step} was abandoned")
