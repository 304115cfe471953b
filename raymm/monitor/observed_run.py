"""Data that observers receive about a run and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.data import MicrobatchMeta
from raymm.model.model import Model
from raymm.monitor.training_data import TrainingData
from raymm.scheduler.minibatch.step_choice import StepOrder
from raymm.scheduler.program.timeline import Timeline

# Steps after each start that are ignored, because they allocate, compile and connect.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class ObservedRun:
    """Run that observers watch.

    Attributes:
        flops: returns a counter of the FLOPs of steps; None if the model's cannot be counted.
        orders: :class:`raymm.training.step_orders.StepOrders` of the run; None if its steps have
            the order of the data.
    """

    parallel: Any
    model: Model
    data: Any
    training: TrainingData
    folder: Path
    say: Callable[[str], None]
    flops: Callable[[], Any] = lambda: None
    orders: Any = None


@dataclass(frozen=True)
class ObservedStep:
    """Step whose result was read.

    Attributes:
        complete: True if no sample of the step was skipped.
        due: True if the step is printed.
        choice: order and schedule of the step, if it was chosen.
    """

    number: int
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    complete: bool
    timeline: Timeline
    due: bool = False
    choice: StepOrder | None = None
