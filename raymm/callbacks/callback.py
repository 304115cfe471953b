"""Interface of callbacks, which receive the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class RunInfo:
    """Description of a run that starts or resumes.

    Attributes:
        first_step: steps taken before; 0 for a new run.
        steps: total number of steps.
        config: configuration by field name (``run.seed``, ``optimizer.lr``, ``model.vision.class``,
            ...); plain JSON.
        modules: module of every key in ``stage_busy`` of a row.
    """

    name: str
    folder: Path
    first_step: int
    steps: int
    config: Mapping[str, Any]
    modules: Mapping[str, str]


@dataclass(frozen=True)
class Restart:
    """Automatic restart from the last checkpoint with other processes.

    Attributes:
        number: number of restarts since :meth:`Callback.on_start`, including this one.
        cause: ``"failure"`` if a process or node was lost; ``"preemption"`` if the loss was
            announced; ``"resize"`` if the cluster has room for other degrees.
        text: description of the event.
        run: the run after the restart; steps after its ``first_step`` are taken again, with the
            same result.
    """

    number: int
    cause: str
    text: str
    run: RunInfo


@dataclass(frozen=True)
class SavedCheckpoint:
    """Committed checkpoint.

    Attributes:
        step: number of steps taken before.
        folder: folder of the checkpoint; its URL if in a bucket.
        seconds: time for which training stopped.
        written_s: seconds from the copy of the state to the commit. Training continues meanwhile
            unless ``run.asynchronous_checkpoints`` is off.
    """

    step: int
    folder: Path | str
    seconds: float
    written_s: float = 0.0


@dataclass(frozen=True)
class RunEnd:
    """End of a run.

    Attributes:
        status: ``"finished"``; ``"stopped"`` by request, with the option to resume; or
            ``"failed"``.
        text: saved state of a stopped run, or error of a failed run; else empty.
    """

    status: Literal["finished", "stopped", "failed"]
    text: str = ""


class Callback:
    """Observer of a run on the driver; override the methods of interest.

    Callbacks do not affect the results of a run. If a callback raises, the error is printed, its
    traceback is written to the folder of the run, and the run continues without this callback.
    Methods are called between steps, while ranks compute steps submitted ahead, so a fast callback
    does not slow training.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called after the first ranks have started, before the first step."""

    def on_restart(self, restart: Restart) -> None:
        """Called after new ranks have started and the run has resumed from its last checkpoint."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Called after a step, with its row of ``metrics.jsonl``: ``step``, ``loss``,
        ``tokens_per_s``, ..."""

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its row of ``metrics.jsonl``: ``step``,
        ``heldout_loss``, ..."""

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Called after a checkpoint is committed."""

    def on_end(self, end: RunEnd) -> None:
        """Called once at the end of the run, also if the run fails after :meth:`on_start`."""


@dataclass(frozen=True)
class StepContext:
    """Step for which a method of a :class:`RunHook` is called.

    Attributes:
        step: number of the step, from 1; at a checkpoint, the number of steps taken.
        steps: total number of steps.
        folder: folder of the run.
    """

    step: int
    steps: int
    folder: Path


class RunHook(Callback):
    """Callback that adds values to the metrics row of each step and has state in checkpoints.

    Hooks are called in the order of ``run.callbacks``, then of the trainer's ``callbacks``. Steps
    are submitted ahead, so :meth:`before_step` of later steps is called before :meth:`after_step`
    of a step. At a checkpoint no step is in flight.

    After a recovery or a restart, the state of the hook after the last step that the run keeps is
    loaded again, and both methods are called again for every replayed step. State is therefore
    equal to that of a run without failure if only :meth:`after_step` changes it.

    A hook that raises is removed from the run as any other callback, and so is a hook whose values
    or state are not valid. Its last saved state is then no longer in checkpoints.
    """

    def before_step(self, context: StepContext) -> None:
        """Called before a step is submitted to the ranks."""

    def after_step(
        self, context: StepContext, row: Mapping[str, Any]
    ) -> Mapping[str, float] | None:
        """Called with the row of a step, before :meth:`on_step`.

        Args:
            row: also has the values of earlier hooks.

        Returns:
            Values that join the row of ``metrics.jsonl``, by names that the row does not have; None
            for no values.
        """

    def at_checkpoint(self, context: StepContext) -> None:
        """Called before the state of the run is saved."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the hook as plain JSON with finite numbers. Called after every step
        and at every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`. Called after
        :meth:`on_start`, and before the first replayed step."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the numbers of a row of ``metrics.jsonl`` for loggers.

    Args:
        row: nested dicts of numbers and lists of numbers; other values and ``step`` are omitted.

    Returns:
        Values by path (``"balance/efficiency"``); for a list, such as one value per rank, the
        largest value as ``"peak_memory_bytes/max"``.
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
