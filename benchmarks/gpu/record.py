"""Results of a section on disk, part by part, so that they survive the process.

A line of JSON for every beginning and end of a part. A part that raises is recorded as an error
with its text, and the next one runs; a part without remaining time is recorded as such.
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
# CUDA errors after a kernel has broken the context: nothing else works in this process.
BROKEN_CONTEXT = (
    "illegal memory access", "device-side assert", "unspecified launch failure",
    "misaligned address", "an illegal instruction", "hardware stack error",
)  # fmt: skip


class BrokenContextError(RuntimeError):
    """Error for a broken CUDA context; another process can continue."""


class Record:
    """Recorder for the parts of one section.

    Args:
        path: file of the section; lines are appended.
        seconds: remaining time limit of the section.
        done: parts that an earlier process of the section has ended.
    """

    def __init__(self, path: Path, seconds: float, done: Iterable[str] = ()) -> None:
        self._path = path
        self._deadline = time.monotonic() + seconds
        self._done = frozenset(done)

    def left(self) -> float:
        """Return the remaining seconds of the section."""
        return self._deadline - time.monotonic()

    def part(self, name: str, call: Callable[[], Mapping[str, Any]], needs: float = 0.0) -> None:
        """Run a part, and record its result or its error.

        Args:
            call: returns figures, ready for JSON.
            needs: expected seconds; with less time left the part is skipped, and recorded as such.

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
        except Exception as error:  # the other parts must run after any error
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
    """Return the last record of every part, in order of their beginning.

    An unfinished line of a dead process is left out.
    """
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
