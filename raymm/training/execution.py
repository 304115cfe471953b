"""What the trainer asks of a plan, whichever style it is of: how to check, start and watch it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raymm.model.multimodal import MultimodalModule
from raymm.monitor.observed_run import ObservedRun, ObservedStep
from raymm.runtime.parallel_module import MultimodalActors
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan
from raymm.training.multiplexed_execution import MultiplexedExecution
from raymm.training.pipelined_execution import PipelinedExecution


class StepObserver(Protocol):
    """What a style makes of the steps of a run."""

    def after_step(self, step: ObservedStep) -> dict[str, Any]:
        """Look at a step; what ``metrics.jsonl`` gets of it."""
        ...

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Write what there is to look at; returns files by what they are."""
        ...


class Execution(Protocol):
    """A plan, as the trainer sees it.

    Attributes:
        plan: itself.
        num_processes: that it runs in.
        modules: module of every name in a step's ``stage_busy``.
        processes: per module how many compute it, where it has them to itself; and of all as
            ``"total"``.
    """

    @property
    def plan(self) -> Plan | StageMapping: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def modules(self) -> Mapping[str, str]: ...

    @property
    def processes(self) -> Mapping[str, int]: ...

    def save(self, folder: Path) -> None:
        """Write it to a run's folder."""

    def check(self, model: MultimodalModule, data: Any, device: str) -> None:
        """Look whether the plan can run this model on these data, before anything starts.

        Args:
            model: that is to be trained.
            data: a ``DataConfig``, or what the trainer takes in its place.
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            ValueError: it cannot; names the field and its value.
        """

    def unkept(self, model: MultimodalModule, data: Any) -> str | None:
        """Why a run that goes on cannot keep it; None if it can."""

    def describe(self, device: str, data: Any) -> list[str]:
        """What runs, in words: the first line is continued by the trainer."""
        ...

    def start(self, model: MultimodalModule, **options: Any) -> MultimodalActors:
        """Start the processes."""
        ...

    def observer(self, run: ObservedRun) -> StepObserver:
        """Of a run that has started."""
        ...


def execution_of(plan: Plan | StageMapping) -> Execution:
    """Of a plan or a mapping."""
    if isinstance(plan, Plan):
        return PipelinedExecution(plan)
    return MultiplexedExecution(plan)
