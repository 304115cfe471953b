"""Logs of a run: one JSON object per line, consistent over restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.errors import ConfigError, RunFileError
from raymm.files.field_errors import shown
from raymm.files.run_files import append, write_whole

METRICS, SAMPLES, DECISIONS = "metrics.jsonl", "samples.jsonl", "rebalancing.jsonl"


class MetricsLog:
    """Append-only ``metrics.jsonl``.

    Rows after the resumed checkpoint are dropped, because those steps are repeated. Rows that
    cannot be written (full or read-only disk) stay in memory and are written, in order, with the
    first later row that can be.

    Args:
        say: called with a line when the file becomes unwritable or writable again.
    """

    def __init__(
        self, path: Path, resume_step: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._path, self._say = path, say
        self._unwritten: list[dict[str, Any]] = []
        self._rewind_to: int | None = None  # the file still has rows after this step
        self._problem: RunFileError | None = None
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            self.rows = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, _lines(self.rows))

    def rewind(self, step: int) -> None:
        """Drop the rows after a step, because those steps are repeated."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._unwritten = [row for row in self._unwritten if row["step"] <= step]
        self._rewind_to = step if self._rewind_to is None else min(step, self._rewind_to)
        self._flush()

    def forget(self) -> None:
        """Drop the rows in memory that the file has, or will have."""
        self.rows = []

    def add(self, row: dict[str, Any]) -> None:
        """Append a row. ``step`` counts steps taken, from 1 (0: before the first). Non-finite
        numbers become None, because JSON has none."""
        row = {name: _number(value) for name, value in row.items()}
        self.rows.append(row)
        self._unwritten.append(row)
        self._flush()

    def finish(self) -> None:
        """Write the rows that are still in memory, at the end of a run. Raise a ``RunFileError`` if
        the file cannot be written."""
        self._flush()
        if self._problem is not None:
            raise self._problem

    def _flush(self) -> None:
        try:
            self._write()
        except RunFileError as error:
            if self._problem is None:
                self._say(f"{error}. The run continues; rows are in memory until it can be written")
            self._problem = error
            return
        if self._problem is not None:
            self._problem = None
            self._say(f"{self._path} is writable again and has all rows")

    def _write(self) -> None:
        if self._rewind_to is not None:
            rows = [row for row in read_metrics(self._path) if row["step"] <= self._rewind_to]
            write_whole(self._path, _lines(rows))
            self._rewind_to = None
        append(self._path, _lines(self._unwritten))
        self._unwritten.clear()


class SampleLog:
    """``samples.jsonl``: ``{"step", "microbatches": ids per microbatch, "skipped": ids}``. Rows
    after the resumed checkpoint are dropped, as in :class:`MetricsLog`, which takes the same
    arguments."""

    def __init__(
        self, path: Path, resume_step: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._log = MetricsLog(path, resume_step, say)
        self._log.forget()

    def rewind(self, step: int) -> None:
        """Drop the rows after a step."""
        self._log.rewind(step)

    def add(self, step: int, microbatches: Sequence[Sequence[str]], skipped: Sequence[str]) -> None:
        """Append the sample ids of each microbatch of a step, and the ids of unreadable samples."""
        ids = [list(samples) for samples in microbatches]
        self._log.add({"step": step, "microbatches": ids, "skipped": list(skipped)})
        self._log.forget()

    def finish(self) -> None:
        """Write the rows that are still in memory. Raises as :meth:`MetricsLog.finish`."""
        self._log.finish()


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all rows. A last line cut off by a crash is dropped. Raise a ``ConfigError`` if the
    file cannot be read, or another line is not a row. Names file and line."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if (row := _row(line)) is None:
                raise ConfigError(
                    f"{path}, line {number} is {shown(line.decode(errors='replace'))}, which is "
                    "not a row that raymm wrote; restore the line, or move the file elsewhere (the "
                    "run then continues without its rows)"
                )
            rows.append(row)
    return rows if (row := _row(last)) is None else [*rows, row]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or a number of thousands of digits
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
