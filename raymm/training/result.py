"""Result of a training run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from raymm.draw.notebook import pictures_html
from raymm.evaluation.best_evaluation import BEST
from raymm.plural import plural
from raymm.storage.step_folders import folder_name


@dataclass
class Result:
    """Outcome of :meth:`raymm.training.trainer.Trainer.fit`, like ``ray.train.Result``.

    Attributes:
        metrics: row of the last step.
        history: all rows of ``metrics.jsonl``.
        checkpoint: folder of the last checkpoint, or its URL in a bucket.
        changed: differences from the run that saved the checkpoint, one line per field.
        corrupt: problems of checkpoints that could not be resumed from, newest first.
        path: run folder. For a run in a bucket, its working folder on this machine.
        files: files to look at, by description (loss curve, schedule, trace).
        steps_not_applied: number of steps in ``history`` with non-finite loss or gradients. Their
            rows have the origin as ``not_applied``.
        stopped: after which step the run stopped and what is saved; None if it took all steps. Set
            after a stop request (:attr:`raymm.training.trainer.Trainer.stop`, ``run.max_seconds``)
            or if the run had to leave a node and found no other.
        exhausted: why the run ended early because its evaluations stopped improving (``patience``
            of ``run.evaluate``); None otherwise.
    """

    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    checkpoint: Path | str | None
    path: Path
    files: dict[str, Path] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    corrupt: tuple[str, ...] = ()
    steps_not_applied: int = 0
    stopped: str | None = None
    exhausted: str | None = None

    @property
    def best_checkpoint(self) -> Path | str | None:
        """Best checkpoint by ``best`` of ``run.evaluate``, in the form of :attr:`checkpoint`; None
        if there is none. The state before the first step has no checkpoint; ``best.json`` has its
        value as ``start``."""
        file = self.path / BEST
        if self.checkpoint is None or not file.is_file():
            return None
        name = folder_name(json.loads(file.read_text())["step"])
        if isinstance(self.checkpoint, Path):
            folder = self.checkpoint.with_name(name)
            return folder if folder.is_dir() else None
        return f"{self.checkpoint.rpartition('/')[0]}/{name}"

    def _repr_html_(self) -> str:
        last = self.metrics
        lines = [f"{self.path}: {plural(last.get('step', 0), 'step')}"]
        if last.get("loss") is not None:
            rate = last["tokens_per_s"]
            lines[0] += f", loss {last['loss']:.4f}" + (f", {rate:,.0f} tokens/s" if rate else "")
        lines += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        lines += [self.stopped] if self.stopped else []
        pictures = {
            name: path for name, path in self.files.items() if name in ("loss curve", "schedule")
        }
        return pictures_html("\n".join(lines), pictures)


def steps_not_applied(rows: Sequence[dict[str, Any]], at_the_end: bool = False) -> int:
    """Return the number of steps that were not applied; with ``at_the_end``, only since the last
    applied step."""
    steps = ["not_applied" in row for row in rows if "loss" in row]
    if at_the_end:
        return len(list(takewhile(bool, reversed(steps))))
    return sum(steps)


def last_step(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the last step; empty if no step was taken."""
    return next((row for row in reversed(rows) if "loss" in row), {})
