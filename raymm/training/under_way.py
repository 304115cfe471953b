"""Progress of work that takes long and has no steps to count."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console

# Seconds without a line after which a console that is not a terminal gets one.
SILENCE_S = 5.0


class UnderWay:
    """Context that shows what is being done: a spinner on a terminal; on another console a line
    after :data:`SILENCE_S` seconds without one, and after twice as many seconds from then on.

    Args:
        text: what is being done; :meth:`update` changes it.
        silence: seconds before the first line; by default :data:`SILENCE_S`.
    """

    def __init__(self, console: Console, text: str, silence: float | None = None) -> None:
        self._console, self._text = console, text
        self._silence = SILENCE_S if silence is None else silence
        self._began = self._spoke = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="under-way", daemon=True)
        self._status = console.status(text) if console.is_terminal else None

    def __enter__(self) -> UnderWay:
        if self._status is not None:
            self._status.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            return
        self._ended.set()
        self._thread.join()

    def update(self, text: str) -> None:
        """Change what is being done."""
        self._text = text
        if self._status is not None:
            self._status.update(text)

    def line(self, text: str) -> None:
        """Print a line, which counts as progress."""
        self._spoke = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _report(self) -> None:
        silence = self._silence
        while not self._ended.wait(max(0.0, self._spoke + silence - time.monotonic())):
            if time.monotonic() - self._spoke >= silence:
                self.line(f"{self._text} ({time.monotonic() - self._began:.0f} s)")
                silence = 2 * self._silence
