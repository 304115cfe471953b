"""Training phases: modules that are frozen or trained from a given step on.

Each phase is planned for the modules that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raymm.errors import ModelError
from raymm.model.model import FROZEN, FULL, Model
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint
from raymm.training.result import Result


class Phases:
    """Schedule that freezes and unfreezes modules. The model is changed in place, between starts of
    its processes.

    Args:
        at: step -> {module: ``"full"`` or ``"frozen"``}, applied after that many steps. Modules are
            named as in plans, optionally with the suffix ``_projector``; parts of a Hugging Face
            VLM as in ``model.train``. For a module with adapters, only the adapters change.

    Raises:
        ModelError: a module is unknown or trained only in part, or a phase trains nothing.
    """

    def __init__(
        self, model: Model, at: Mapping[int, Mapping[str, str]],
        steps: int,
    ) -> None:
        self._at = {step: dict(at[step]) for step in sorted(at) if step < steps}
        self._steps = steps
        if not at:
            check_trains(model)
            return
        self._model = model
        names = sorted({name for changes in at.values() for name in changes})
        self._first = {name: model.mode(name) for name in names}
        model.set_changing(set().union(*map(model.modules_of, names)))
        try:
            for step in (0, *self._at):
                self.enter(step)
                check_trains(model, f"after step {step} of run.at " if step else "")
        finally:
            self.enter(0)

    def enter(self, step: int) -> None:
        """Freeze and unfreeze modules for the step that follows ``step`` taken steps."""
        if not self._at:
            return
        modes = dict(self._first)
        for start, changes in self._at.items():
            modes |= changes if start <= step else {}
        for name, mode in modes.items():
            self._model.set_frozen(name, mode == FROZEN)

    def enter_before(self, checkpoint: Checkpoint | None) -> None:
        """Set the modules as for the last step before a checkpoint, or for the first step if it is
        None."""
        self.enter(0 if checkpoint is None else max(checkpoint.manifest.step - 1, 0))

    def enter_after(self, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> int:
        """Set the modules as for the step after a checkpoint. Return the number of steps taken.

        Args:
            say: called with a line if modules change at this step.
        """
        step = 0 if checkpoint is None else checkpoint.manifest.step
        self.enter(step)
        if changes := self.changes(step):
            say(f"after step {step} {changes}")
        return step

    def end(self, step: int) -> int:
        """Return the number of steps at which the phase ends that starts or continues after
        ``step`` steps."""
        return next((start for start in self._at if start > step), self._steps)

    def plan(self, plan: Plan | None) -> Plan | None:
        """Return a given plan with the graph of the model in its current phase."""
        return plan if plan is None or not self._at else replace(plan, graph=self._model.graph)

    def changes(self, step: int) -> str:
        """Describe the changes after ``step`` steps; empty if nothing changes."""
        return ", ".join(
            f"{name} is {'trained' if mode == FULL else 'frozen'}"
            for name, mode in self._at.get(step, {}).items()
        )

    def go_on_after(self, result: Result, say: Callable[[str], None]) -> bool:
        """Return True if an attempt ended because its phase ended.

        Args:
            say: called with a line if the run ends here because evaluations stopped improving.
        """
        step = result.metrics.get("step", 0)
        if result.stopped is not None or not self.changes(step):
            return False
        if result.exhausted is not None:
            say(f"step {step:>5}  the run ends: {result.exhausted}")
        return result.exhausted is None

    def dropped(self, step: int) -> tuple[str, ...]:
        """Return the name prefixes of optimizer state that is not needed after ``step`` steps."""
        return tuple(
            f"optimizer/{prefix}"
            for name, mode in self._at.get(step, {}).items() if mode == FROZEN
            for prefix in self._model.state_prefixes(name)
        )


def check_trains(model: Model, when: str = "") -> None:
    """Raise ModelError if no parameter of the model is trained."""
    counts = model.parameter_counts()
    if not any(trained for trained, _ in counts.values()):
        raise ModelError(
            f"{when}nothing is trained: {', '.join(counts)} are frozen; at least one of them must "
            "be trained in full or have adapters"
        )
