"""Modules that are frozen or trained from a step on: a run in phases, each planned for what trains
in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raymm.errors import ModelError
from raymm.layout.changing_parts import changing_parts
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import FROZEN, FULL, WholeModel
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint
from raymm.training.result import Result


class Phases:
    """What trains when. The model is changed in place, between its starts.

    Args:
        model: the description.
        at: by step, after which it holds: by module as plans name it, or that with ``_projector``,
            of a whole model by part as ``model.train`` names it, ``"full"`` or ``"frozen"``; of
            one with adapters these are.
        steps: of the run.

    Raises:
        ModelError: a module that is none, or is trained in part; nothing trains in a phase.
    """

    def __init__(
        self, model: MultimodalModule | WholeModel, at: Mapping[int, Mapping[str, str]],
        steps: int,
    ) -> None:
        self._at = {step: dict(at[step]) for step in sorted(at) if step < steps}
        self._steps = steps
        if not at:
            check_trains(model)
            return
        self._parts = changing_parts(model)
        names = sorted({name for changes in at.values() for name in changes})
        self._first = {name: self._parts.mode(name) for name in names}
        self._parts.change(names)
        try:
            for step in (0, *self._at):
                self.enter(step)
                check_trains(model, f"after step {step} of run.at " if step else "")
        finally:
            self.enter(0)

    def enter(self, step: int) -> None:
        """The model as the step after so many has it.

        Args:
            step: number of steps taken.
        """
        if not self._at:
            return
        modes = dict(self._first)
        for start, changes in self._at.items():
            modes |= changes if start <= step else {}
        for name, mode in modes.items():
            self._parts.set_frozen(name, mode == FROZEN)

    def enter_before(self, checkpoint: Checkpoint | None) -> None:
        """The model as the last step before a checkpoint had it.

        Args:
            checkpoint: that a run goes on from; None at its start.
        """
        self.enter(0 if checkpoint is None else max(checkpoint.manifest.step - 1, 0))

    def enter_after(self, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> int:
        """The model as the step after a checkpoint has it; returns how many were taken.

        Args:
            checkpoint: as of :meth:`enter_before`.
            say: is told of what changes there.
        """
        step = 0 if checkpoint is None else checkpoint.manifest.step
        self.enter(step)
        if changes := self.changes(step):
            say(f"after step {step} {changes}")
        return step

    def end(self, step: int) -> int:
        """Steps taken when the phase is over that the next step is in.

        Args:
            step: number of steps taken.
        """
        return next((start for start in self._at if start > step), self._steps)

    def plan(self, plan: Plan | None) -> Plan | None:
        """A plan that was given, of the model as it is now."""
        return plan if plan is None or not self._at else replace(plan, graph=self._parts.graph)

    def changes(self, step: int) -> str:
        """What changes after so many steps, in words; nothing: empty."""
        return ", ".join(
            f"{name} is {'trained' if mode == FULL else 'frozen'}"
            for name, mode in self._at.get(step, {}).items()
        )

    def go_on_after(self, result: Result, say: Callable[[str], None]) -> bool:
        """Whether an attempt has ended because a phase has.

        Args:
            result: of the attempt.
            say: is told if the run ends with the phase, as the model got no better.
        """
        step = result.metrics.get("step", 0)
        if result.stopped is not None or not self.changes(step):
            return False
        if result.exhausted is not None:
            say(f"step {step:>5}  the run ends: {result.exhausted}")
        return result.exhausted is None

    def dropped(self, step: int) -> tuple[str, ...]:
        """How names of what the optimizer keeps, and no longer needs after so many steps, begin."""
        return tuple(
            f"optimizer/{prefix}"
            for name, mode in self._at.get(step, {}).items() if mode == FROZEN
            for prefix in self._parts.prefixes(name)
        )


def check_trains(model: MultimodalModule | WholeModel, when: str = "") -> None:
    """
    Raises:
        ModelError: nothing of the model is trained.
    """
    counts = model.parameter_counts()
    if not any(trained for trained, _ in counts.values()):
        raise ModelError(
            f"{when}nothing is trained: {', '.join(counts)} are frozen; at least one of them must "
            "be trained in full or have adapters"
        )
