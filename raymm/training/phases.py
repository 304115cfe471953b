"""Modules that are frozen or trained from a step on: a run in phases, each planned for what trains
in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.optimizer.optimizer_config import PROJECTOR
from raymm.config.sections import ConfigError
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel, of_parts
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint
from raymm.training.result import Result

FULL, FROZEN = "full", "frozen"


class Phases:
    """What trains when. The model is changed in place, between its starts.

    Args:
        model: the description.
        at: by step, after which it holds: by module as plans name it, or that with ``_projector``,
            ``"full"`` or ``"frozen"``; of a module with adapters these are.
        steps: of the run.

    Raises:
        ConfigError: a module that is none, or is trained in part.
    """

    def __init__(
        self, model: MultimodalModule | WholeModel, at: Mapping[int, Mapping[str, str]],
        steps: int,
    ) -> None:
        self._at = {step: dict(at[step]) for step in sorted(at) if step < steps}
        self._steps = steps
        if not at:
            return
        self._model: MultimodalModule = of_parts(model, "at is given")
        names = sorted({name for changes in at.values() for name in changes})
        self._first = {name: self._mode(name) for name in names}
        self._model.changing = frozenset(name.removesuffix(PROJECTOR) for name in names)

    def _mode(self, name: str) -> str:
        model = self._model
        accepted = [*model.module_names]
        accepted += [f"{n}{PROJECTOR}" for n, e in model.encoders.items() if e.projector]
        if name not in accepted:
            raise ConfigError(f"at names {name!r}; the model's are {', '.join(accepted)}")
        parameters = dict(self._skeleton(name).named_parameters())
        adapters = [p for parameter, p in parameters.items() if is_adapter(parameter)]
        flags = {p.requires_grad for p in adapters or parameters.values()}
        if len(flags) > 1:
            raise ConfigError(
                f"at names {name!r}, which is trained in part; accepted: modules that are frozen "
                "or trained as a whole"
            )
        return FULL if True in flags else FROZEN

    def _part(self, name: str) -> tuple[Any, bool]:
        projector = name.endswith(PROJECTOR)
        module = name.removesuffix(PROJECTOR)
        return self._model.encoders.get(module, self._model.language_model), projector

    def _skeleton(self, name: str) -> Any:
        part, projector = self._part(name)
        spec: Any = self._model.spec(name.removesuffix(PROJECTOR))
        return part.projector if projector else spec.source.skeleton()

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
            part, projector = self._part(name)
            part.set_frozen(mode == FROZEN, projector)

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
        return plan if plan is None or not self._at else replace(plan, graph=self._model.graph)

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
            f"optimizer/{name.removesuffix(PROJECTOR)}/"
            + ("projector." if name.endswith(PROJECTOR) else "module.")
            for name, mode in self._at.get(step, {}).items() if mode == FROZEN
        )
