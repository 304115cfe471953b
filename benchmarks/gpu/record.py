"""What a section finds out, on disk part by part: what was found before a process died is kept.

A line of JSON for every beginning and end of a part. A part that raises is an error with its
text, and the next one runs; one for which no time is left says so.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# Lines of a traceback that an error keeps.
TRACEBACK_LINES = 12
# What CUDA says once a kernel has broken its context: nothing more works in this process.
BROKEN_CONTEXT = (
    "illegal memory access", "device-side assert", "unspecified launch failure",
    "misaligned address", "an illegal instruction", "hardware stack error",
)  # fmt: skip


class BrokenContextError(RuntimeError):
    """The process's CUDA context is of no more use; another process can go on."""


class Record:
    """Writes the parts of one section.

    Args:
        path: of the section's file; appended to.
        seconds: that the section may take from here on.
        done: parts that an earlier process of the section has ended.
    """

    def __init__(self, path: Path, seconds: float, done: Iterable[str] = ()) -> None:
        self._path = path
        self._deadline = time.monotonic() + seconds
        self._done = frozenset(done)

    def left(self) -> float:
        """Seconds of the section's time that remain."""
        return self._deadline - time.monotonic()

    def part(self, name: str, call: Callable[[], Mapping[str, Any]], needs: float = 0.0) -> None:
        """Run a part, and write what it returns, or its error.

        Args:
            name: unique in the section.
            call: gives figures, ready for JSON.
            needs: seconds that it takes about; with fewer left it does not run, and says so.

        Raises:
            BrokenContextError: no other part can run in this process.
        """
        if name in self._done:
            return
        if self.left() < needs or self.left() < 0:
            self._write(name, "not_run", reason=f"{max(self.left(), 0):.0f} s were left")
            return
        self._write(name, "begun")
        start = time.monotonic()
        try:
            figures = dict(call())
        except Exception as error:  # whatever a part meets, the others are to run
            text = "".join(traceback.format_exception(error)[-TRACEBACK_LINES:])
            self._write(name, "error", error=f"{type(error).__name__}: {error}", traceback=text)
            if any(words in str(error) for words in BROKEN_CONTEXT):
                raise BrokenContextError(str(error)) from error
            return
        self._write(name, "ok", seconds=round(time.monotonic() - start, 2), **figures)

    def _write(self, part: str, state: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"part": part, "state": state, **values}, default=str) + "\n")


def read_parts(path: Path) -> dict[str, dict[str, Any]]:
    """The last that was written of every part, in the order of their beginning. A line that a dying
    process has not finished is left out."""
    parts: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return parts
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        parts[row.pop("part")] = row
    return parts
