"""Selection of the best evaluation of a run, and early stopping without improvement."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raymm.config.sections import EvaluateSection
from raymm.errors import RunFileError
from raymm.files.run_files import write_whole

BEST = "best.json"
PREFIX = "heldout_"  # of metric names in rows
TEXTS = "texts"  # number of texts; only rows of evaluations have this key

Rows = Sequence[Mapping[str, Any]]


class BestEvaluation:
    """Decisions based on the metric ``best`` of ``run.evaluate``, computed from metrics rows only.
    Without ``best``, no evaluation is the best. :data:`BEST` is written to ``folder``, the folder
    of the run.

    Values that are not finite are never the best, as in the Trainer of transformers.
    """

    def __init__(self, asked: EvaluateSection, folder: Path) -> None:
        self._asked, self._folder = asked, folder

    def improved(self, rows: Rows) -> bool:
        """Return True if the last evaluation is better than all earlier ones. The evaluation before
        the first step does not count, because it has no checkpoint."""
        losses = [loss for step, loss in self._losses(rows) if step]
        return bool(losses) and losses[-1] < min(losses[:-1], default=math.inf)

    def exhausted(self, rows: Rows) -> str | None:
        """Return the reason to end the run if the last ``patience`` evaluations brought no
        improvement, else None. The evaluation before the first step counts as an earlier one."""
        losses, patience = [loss for _, loss in self._losses(rows)], self._asked.patience
        if patience is None or len(losses) <= patience:
            return None
        if min(losses[-patience:]) < min(losses[:-patience]):
            return None
        return f"the last {patience} evaluations did not improve {self._asked.best}"

    def write(self, rows: Rows, steps: Collection[int]) -> int | None:
        """Write :data:`BEST` for the best checkpoint; return its step, or None if there is none.
        ``steps`` are the steps of committed checkpoints; other evaluations, and those before the
        first step, are ignored."""
        losses = [(step, loss) for step, loss in self._losses(rows) if step in steps]
        step, smallest = min(losses, key=lambda pair: pair[1], default=(0, math.inf))
        if smallest == math.inf:
            (self._folder / BEST).unlink(missing_ok=True)
            return None
        values = {row["step"]: row[self._name] for row in self._evaluations(rows)}
        best = {
            "step": step, "metric": self._asked.best, "value": values[step],
            "start": values.get(0),
        }
        with suppress(RunFileError):  # disk full; the next evaluation writes the file again
            write_whole(self._folder / BEST, json.dumps(best) + "\n")
        return step

    @property
    def _name(self) -> str:
        return f"{PREFIX}{self._asked.best}"

    def _losses(self, rows: Rows) -> list[tuple[int, float]]:
        """Return (step, loss) of each evaluation; a smaller loss is better."""
        sign = 1 if self._asked.smallest else -1
        values = [(row["step"], row[self._name]) for row in self._evaluations(rows)]
        return [(step, math.inf if value is None else sign * value) for step, value in values]

    def _evaluations(self, rows: Rows) -> list[Mapping[str, Any]]:
        """Return the rows of evaluations. Other rows of the held-out loss may also have rewards."""
        return [row for row in rows if TEXTS in row and self._name in row]
