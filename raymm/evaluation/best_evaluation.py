"""The best evaluation of a run, and the rule that ends a run without improvement."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raymm.config.evaluate_section import EvaluateSection
from raymm.errors import RunFileError
from raymm.files.run_files import write_whole

BEST = "best.json"
PREFIX = "heldout_"  # of a metric in a row
TEXTS = "texts"  # how many there are, in rows of evaluations alone

Rows = Sequence[Mapping[str, Any]]


class BestEvaluation:
    """Decisions that follow from the metric ``best`` of ``run.evaluate``, from rows alone.

    A value that is not finite is never the best, as in the Trainer of transformers.

    Args:
        asked: the section; without ``best`` no evaluation is the best one.
        folder: of the run, where :data:`BEST` is written.
    """

    def __init__(self, asked: EvaluateSection, folder: Path) -> None:
        self._asked, self._folder = asked, folder

    def improved(self, rows: Rows) -> bool:
        """Return True if the last evaluation is better than all evaluations before it, without the
        evaluation before the first step, which has no checkpoint.

        Args:
            rows: of the run's metrics.
        """
        losses = [loss for step, loss in self._losses(rows) if step]
        return bool(losses) and losses[-1] < min(losses[:-1], default=math.inf)

    def exhausted(self, rows: Rows) -> str | None:
        """Return why the run ends, or None: its last ``patience`` evaluations brought nothing
        better. The evaluation before the first step counts as one of those before them.

        Args:
            rows: of the run's metrics.
        """
        losses, patience = [loss for _, loss in self._losses(rows)], self._asked.patience
        if patience is None or len(losses) <= patience:
            return None
        if min(losses[-patience:]) < min(losses[:-patience]):
            return None
        return f"the last {patience} evaluations did not improve {self._asked.best}"

    def write(self, rows: Rows, steps: Collection[int]) -> int | None:
        """Write :data:`BEST` for the best checkpoint; return its step, or None without one.

        Args:
            rows: of the run's metrics.
            steps: of the checkpoints that exist. An evaluation whose checkpoint is not committed,
                or that came before the first step, is no candidate.
        """
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
        with suppress(RunFileError):  # a full disk; it is written again after the next evaluation
            write_whole(self._folder / BEST, json.dumps(best) + "\n")
        return step

    @property
    def _name(self) -> str:
        return f"{PREFIX}{self._asked.best}"

    def _losses(self, rows: Rows) -> list[tuple[int, float]]:
        """Return (step, loss) of each evaluation: the smaller the loss, the better."""
        sign = 1 if self._asked.smallest else -1
        values = [(row["step"], row[self._name]) for row in self._evaluations(rows)]
        return [(step, math.inf if value is None else sign * value) for step, value in values]

    def _evaluations(self, rows: Rows) -> list[Mapping[str, Any]]:
        """Return rows of evaluations; of pairs, rows of the held-out loss have rewards, too."""
        return [row for row in rows if TEXTS in row and self._name in row]
