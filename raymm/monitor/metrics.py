"""A run's logs: one JSON object per line, kept whole over restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raymm.files.config_error import ConfigError, shown
from raymm.files.run_files import append, write_whole

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class MetricsLog:
    """Append-only ``metrics.jsonl``.

    Rows after the checkpoint that a run resumes from are dropped: those steps happen again.

    Args:
        path: the file.
        resume_step: number of steps already taken.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            self.rows = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def rewind(self, step: int) -> None:
        """Drop rows after a step: those steps happen again.

        Args:
            step: its number.
        """
        rows = read_metrics(self._path)
        kept = [row for row in rows if row["step"] <= step]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self.rows = [row for row in self.rows if row["step"] <= step]

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; ``step`` counts steps taken, from 1 (0: before the first). JSON has no
        numbers that are not finite: they become None."""
        row = {name: _number(value) for name, value in row.items()}
        self.rows.append(row)
        append(self._path, json.dumps(row) + "\n")


class SampleLog:
    """``samples.jsonl``: ``{"step", "microbatches": ids per microbatch, "skipped": ids}``.

    Rows after the checkpoint that a run resumes from are dropped, as those of the metrics.

    Args:
        path: the file.
        resume_step: number of steps already taken.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._log = MetricsLog(path, resume_step)
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
                    f"{path}, line {number} is {shown(line.decode(errors='replace'))}, and no row "
                    "that raymm wrote; put back what it was, or move the file elsewhere (the run "
                    "goes on without the rows that it has)"
                )
            rows.append(row)
    return rows if (row := _row(last)) is None else [*rows, row]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, not UTF-8, a number of thousands of digits
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
