"""What those who watch a run are told of it and of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.data import MicrobatchMeta
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.monitor.training_data import TrainingData
from raymm.scheduler.program.timeline import Timeline


@dataclass(frozen=True)
class ObservedRun:
    """A run.

    Attributes:
        parallel: the model that runs.
        model: its description.
        data: of the run.
        training: how they are taken.
        folder: of the run.
        say: prints a line.
    """

    parallel: Any
    model: MultimodalModule | WholeModel
    data: Any
    training: TrainingData
    folder: Path
    say: Callable[[str], None]


@dataclass(frozen=True)
class ObservedStep:
    """A step that was taken.

    Attributes:
        number: from 1.
        meta: of its microbatches.
        state_after: the data position after it.
        complete: whether it had all its samples.
        timeline: what was measured.
    """

    number: int
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    complete: bool
    timeline: Timeline
