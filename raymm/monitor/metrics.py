"""A run's logs: one JSON object per line, kept whole over restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.errors import ConfigError, RunFileError
from raymm.files.field_errors import shown
from raymm.files.run_files import append, write_whole

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class MetricsLog:
    """Append-only ``metrics.jsonl``.

    Rows after the checkpoint that a run resumes from are dropped: those steps happen again. Rows
    that cannot be written (the disk is full, or read-only) stay in memory and are written, in
    order, with the first later row that can be.

    Args:
        path: the file.
        resume_step: number of steps already taken.
        say: prints a line when the file cannot be written, and when it can be written again.
    """

    def __init__(
        self, path: Path, resume_step: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._path, self._say = path, say
        self._unwritten: list[dict[str, Any]] = []
        self._rewind_to: int | None = None  # the file has rows after this step
        self._problem: RunFileError | None = None
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            self.rows = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, _lines(self.rows))

    def rewind(self, step: int) -> None:
        """Drop rows after a step: those steps happen again.

        Args:
            step: its number.
        """
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._unwritten = [row for row in self._unwritten if row["step"] <= step]
        self._rewind_to = step if self._rewind_to is None else min(step, self._rewind_to)
        self._flush()

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; ``step`` counts steps taken, from 1 (0: before the first). JSON has no
        numbers that are not finite: they become None."""
        row = {name: _number(value) for name, value in row.items()}
        self.rows.append(row)
        self._unwritten.append(row)
        self._flush()

    def finish(self) -> None:
        """Write the rows that are still in memory, at the end of a run.

        Raises:
            RunFileError: the file cannot be written.
        """
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
    """``samples.jsonl``: ``{"step", "microbatches": ids per microbatch, "skipped": ids}``.

    Rows after the checkpoint that a run resumes from are dropped, as those of the metrics.

    Args:
        path, resume_step, say: as of :class:`MetricsLog`.
    """

    def __init__(
        self, path: Path, resume_step: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._log = MetricsLog(path, resume_step, say)
        self._log.rows = []  # nobody asks for them

    def rewind(self, step: int) -> None:
        """Drop rows after a step, as of the metrics.

        Args:
            step: its number.
        """
        self._log.rewind(step)

    def add(
        self, step: int, microbatches: Sequence[Sequence[str]], skipped: Sequence[str]
    ) -> None:
        """Append a step's samples.

        Args:
            step: its number.
            microbatches: ids of every microbatch's samples.
            skipped: ids of samples that could not be read.
        """
        ids = [list(samples) for samples in microbatches]
        self._log.add({"step": step, "microbatches": ids, "skipped": list(skipped)})
        self._log.rows.clear()

    def finish(self) -> None:
        """Write the rows that are still in memory; raises as :meth:`MetricsLog.finish`."""
        self._log.finish()


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that a crash has cut off is left out.

    Raises:
        ConfigError: it cannot be read, or another line is no row; names the file and the line.
    """
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
    except (ValueError, RecursionError):  # no JSON, not UTF-8, a number of thousands of digits
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
