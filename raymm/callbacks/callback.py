"""What a run tells those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class RunInfo:
    """A run that begins, or goes on.

    Attributes:
        name: of its folder.
        folder: where it keeps everything.
        first_step: steps that were taken before; 0 for a new run.
        steps: that it takes in all.
        config: what it is made of (``run.seed``, ``optimizer.lr``, ``model.vision.class``, ...);
            plain JSON, by the names of the fields.
        modules: module of every name in a row's ``stage_busy``.
    """

    name: str
    folder: Path
    first_step: int
    steps: int
    config: Mapping[str, Any]
    modules: Mapping[str, str]


@dataclass(frozen=True)
class Restart:
    """A run goes on by itself, from its last checkpoint, with other processes.

    Attributes:
        number: of restarts since :meth:`Callback.on_start`, this one included.
        cause: ``"failure"``, if a process or node was lost; ``"preemption"``, if that was
            announced; ``"resize"``, if there is room for other degrees.
        text: what happened.
        run: as it is now; steps after its ``first_step`` are taken again, with the same result.
    """

    number: int
    cause: str
    text: str
    run: RunInfo


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is committed.

    Attributes:
        step: after which it was taken.
        folder: of the checkpoint; in a bucket, its URL.
        seconds: that the run stood still for it.
        written_s: from the copy of the state until it was committed; steps go on meanwhile, unless
            ``run.asynchronous_checkpoints`` is off.
    """

    step: int
    folder: Path | str
    seconds: float
    written_s: float = 0.0


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        status: ``"finished"``; ``"stopped"``, if it was asked to and can go on; ``"failed"``.
        text: what was saved of a stopped run, or the error of a failed one; else empty.
    """

    status: Literal["finished", "stopped", "failed"]
    text: str = ""


class Callback:
    """Watches a run, on the driver; override what is of interest.

    A run's numbers do not depend on who watches: what a callback raises is printed, with its
    traceback in the run's folder, and the run goes on without this callback. Methods are called
    between steps, while ranks compute those that were submitted ahead, so a quick one costs
    nothing.
    """

    def on_start(self, run: RunInfo) -> None:
        """The first ranks have started, and no step of this start is taken."""

    def on_restart(self, restart: Restart) -> None:
        """Other ranks have started, and the run goes on from its last checkpoint."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A step was taken.

        Args:
            row: as ``metrics.jsonl`` has it: ``step``, ``loss``, ``tokens_per_s``, ...
        """

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """The held-out data were evaluated.

        Args:
            row: as ``metrics.jsonl`` has it: ``step``, ``heldout_loss``, ...
        """

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """A checkpoint is on disk."""

    def on_end(self, end: RunEnd) -> None:
        """The run is over. Called once, also of a run that failed after :meth:`on_start`."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of ``metrics.jsonl``, for loggers that take one level.

    Args:
        row: nested dicts of numbers, lists of numbers, and anything else, which is left out.

    Returns:
        Values by path (``"balance/efficiency"``); of a list (of ranks, say) its largest as
        ``"peak_memory_bytes/max"``. ``step`` is left out: loggers have a place of their own for it.
    """
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": number for key, number in scalars(value).items()}
        elif isinstance(value, list):
            numbers = [number for item in value if (number := _number(item)) is not None]
            if numbers and len(numbers) == len(value):
                flat[f"{name}/max"] = max(numbers)
        elif name != "step" and (number := _number(value)) is not None:
            flat[name] = number
    return flat


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None
