"""``rebalancing.jsonl``: log of all checks of measured costs in a run, and their decisions.

Decisions after the last checkpoint are not in the checkpoint's data position. A resumed run reads
them here, so that it repeats the lost steps with the same samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raymm.data import Decision
from raymm.files.run_files import append, write_whole
from raymm.monitor.metrics import read_metrics


class DecisionLog:
    """Append-only log. A row is on disk before its decision takes effect.

    Rows: ``{"step": after which costs were checked, "sizes": digest, "decision": null or {"epoch",
    "step", "costs"}, ...}`` with the values that led to the decision.

    Args:
        path: the file. A line cut off by a crash is dropped.
        digest: digest of the samples' sizes. Rows with another digest are dropped.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        rows = read_metrics(path) if path.is_file() else []
        self.rows = [row for row in rows if row.get("sizes") == digest]
        write_whole(path, _lines(self.rows))

    @property
    def last_step(self) -> int:
        """Last step after which costs were checked; 0 if none. All decisions up to it are made."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def decisions(self) -> list[Decision]:
        """Decisions in order."""
        rows = [row["decision"] for row in self.rows if row["decision"] is not None]
        return [Decision(row["epoch"], row["step"], row["costs"]) for row in rows]

    def add(self, row: dict[str, Any], decision: Decision | None) -> None:
        """Append a row. It is on disk when this returns. Raise a ``RunFileError`` if the row cannot
        be written, so the decision must not take effect."""
        row = {**row, "sizes": self._digest, "decision": decision and decision._asdict()}
        append(self._path, _lines([row]), durable=True)
        self.rows.append(row)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
