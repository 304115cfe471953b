"""What a run came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from raymm.draw.notebook import pictures_html
from raymm.evaluation.best_evaluation import BEST
from raymm.storage.step_folders import folder_name


@dataclass
class Result:
    """Outcome of :meth:`raymm.training.trainer.Trainer.fit`, like ``ray.train.Result``.

    Attributes:
        metrics: the last step's row.
        history: all rows of ``metrics.jsonl``.
        checkpoint: folder of the last checkpoint; in a bucket, its URL.
        changed: what is other than in the run that the checkpoint was saved by.
        corrupt: what is wrong with checkpoints that the run could not go on from, newest first.
        path: the run's folder; of a run in a bucket, the one of this machine that it worked in.
        files: what to look at, by what it is (loss curve, schedule, trace).
        steps_not_applied: of all steps in ``history``, as their loss or gradients were not finite;
            ``not_applied`` of their rows says where that began.
        stopped: of a run that was asked to stop (:attr:`raymm.training.trainer.Trainer.stop`,
            ``run.max_seconds``), or had to leave a node and found no other, after which step, and
            what is saved; None if it has taken all its steps.
        exhausted: why it ended, where its last evaluations were no better (``patience`` of
            ``run.evaluate``).
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
        """Best checkpoint by ``best`` of ``run.evaluate``, as :attr:`checkpoint`; None without.

        The state before the first step is no checkpoint: ``best.json`` has its value as
        ``start``."""
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
        lines = [f"{self.path}: {last.get('step', 0)} steps"]
        if last.get("loss") is not None:
            lines[0] += f", loss {last['loss']:.4f}, {last['tokens_per_s']:,.0f} tokens/s"
        lines += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        lines += [self.stopped] if self.stopped else []
        pictures = {
            name: path for name, path in self.files.items() if name in ("loss curve", "schedule")
        }
        return pictures_html("\n".join(lines), pictures)


def steps_not_applied(rows: Sequence[dict[str, Any]], at_the_end: bool = False) -> int:
    """How many steps were not applied; ``at_the_end``: since the last one that was."""
    steps = ["not_applied" in row for row in rows if "loss" in row]
    if at_the_end:
        return len(list(takewhile(bool, reversed(steps))))
    return sum(steps)


def last_step(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last row of a step that was taken; empty if there is none."""
    return next((row for row in reversed(rows) if "loss" in row), {})
