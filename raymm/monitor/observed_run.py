"""Data that observers receive about a run and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.data import MicrobatchMeta
from raymm.model.model import Model
from raymm.monitor.training_data import TrainingData
from raymm.scheduler.program.timeline import Timeline

# Steps after each start that are ignored, because they allocate, compile and connect.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class ObservedRun:
    """Run that observers watch."""

    parallel: Any
    model: Model
    data: Any
    training: TrainingData
    folder: Path
    say: Callable[[str], None]


@dataclass(frozen=True)
class ObservedStep:
    """Step whose result was read.

    Attributes:
        complete: True if no sample of the step was skipped.
    """

    number: int
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    complete: bool
    timeline: Timeline
