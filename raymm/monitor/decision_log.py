"""``rebalancing.jsonl``: every look at measured costs in a run, and what was decided.

What was decided after the last checkpoint is not in the checkpoint's data position. A run that goes
on from there reads it here, so that it repeats the steps that were lost with the same samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raymm.data import Decision
from raymm.files.run_files import append, write_whole
from raymm.monitor.metrics import read_metrics


class DecisionLog:
    """Append-only, and on disk before a decision is acted on.

    Rows: ``{"step": after which was looked, "sizes": digest, "decision": null or {"epoch", "step",
    "costs"}, ...}`` with the figures that were decided by.

    Args:
        path: the file. A line cut off by a crash is dropped.
        digest: of the samples' sizes; rows of others are dropped, they are of other data.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        rows = read_metrics(path) if path.is_file() else []
        self.rows = [row for row in rows if row.get("sizes") == digest]
        write_whole(path, _lines(self.rows))

    @property
    def last_step(self) -> int:
        """The last step after which was looked; 0 if never. Up to there all is decided."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, in order."""
        rows = [row["decision"] for row in self.rows if row["decision"] is not None]
        return [Decision(row["epoch"], row["step"], row["costs"]) for row in rows]

    def add(self, row: dict[str, Any], decision: Decision | None) -> None:
        """Append a look; on disk when this returns.

        Raises:
            RunFileError: the look cannot be written, so the decision must not be acted on.
        """
        row = {**row, "sizes": self._digest, "decision": decision and decision._asdict()}
        append(self._path, _lines([row]), durable=True)
        self.rows.append(row)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
