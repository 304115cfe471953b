"""Invocation of callbacks, such that no callback can end a run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from raymm.callbacks.callback import (
    Callback,
    Restart,
    RunEnd,
    RunHook,
    RunInfo,
    SavedCheckpoint,
    StepContext,
)
from raymm.errors import USER_CODE_RAISES, ConfigError, ModelError
from raymm.files.run_files import write_whole
from raymm.packages import import_object

# File in the folder of the run with the traceback of a failed callback.
FAILED_FILE = "callback-{name}.txt"
LOGGERS = {
    "tensorboard": "raymm.callbacks.tensorboard:TensorBoardCallback",
    "wandb": "raymm.callbacks.wandb:WandbCallback",
    "mlflow": "raymm.callbacks.mlflow:MLflowCallback",
}
# Callback of every run.
RAY_METRICS = "raymm.callbacks.ray_metrics:RayMetrics"


class CallbackHandler:
    """Context manager that invokes the callbacks of one start of a run in order, and reports its
    end to them. ``say`` prints a line."""

    def __init__(
        self, callbacks: Sequence[Callback], folder: Path, say: Callable[[str], None]
    ) -> None:
        self._callbacks, self._folder, self._say = list(callbacks), folder, say
        self._end = RunEnd("finished")
        self._started = False
        self._steps = 0
        names = [type(callback).__name__ for callback in self._callbacks]
        # Names of states in checkpoints: the second hook of a class is "Class#2".
        self._hooks = {
            name if not (earlier := names[:i].count(name)) else f"{name}#{earlier + 1}": callback
            for i, (name, callback) in enumerate(zip(names, self._callbacks, strict=True))
            if isinstance(callback, RunHook)
        }
        # States of the hooks after a step, by step; the first are those of a new run.
        self._states: dict[int, str] = {}
        self._initial: str | None = None

    def __enter__(self) -> CallbackHandler:
        return self

    def start(self, run: RunInfo) -> None:
        self._started = True
        self._call("on_start", run)

    def restart(self, restart: Restart) -> None:
        self._end = RunEnd("finished")
        self._call("on_restart", restart)

    @property
    def started(self) -> bool:
        return self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._end = RunEnd("stopped", "at once")
        elif error is not None:
            self._end = RunEnd("failed", f"{type(error).__name__}: {error}")
        if self._started:
            self._call("on_end", self._end)

    def load_hooks(self, step: int, steps: int, states: Mapping[str, Any] | None) -> None:
        """Load the hooks' states at the start of an attempt.

        Args:
            step: number of steps taken before.
            states: result of :meth:`hook_states` in the checkpoint; None if there is none. Hooks
                without a state in it begin as in a new run.
        """
        self._steps = steps
        if self._initial is None:
            self._initial = json.dumps(self.hook_states())
        self._load(json.loads(self._initial) | dict(states or {}))
        self._states = {step: json.dumps(self.hook_states())}

    def rewind(self, step: int) -> None:
        """Load the states of the last step up to ``step``, and forget later states."""
        self._states = {s: state for s, state in self._states.items() if s <= step}
        if self._states:
            self._load(json.loads(self._states[max(self._states)]))

    def forget(self, step: int) -> None:
        """Forget states that no recovery needs because the oldest snapshot is of this step."""
        oldest = max((s for s in self._states if s <= step), default=step)
        self._states = {s: state for s, state in self._states.items() if s >= oldest}

    def before_step(self, step: int) -> None:
        for hook in list(self._hooks.values()):
            self._try(hook, "before_step", lambda hook=hook: hook.before_step(self._context(step)))

    def after_step(self, row: dict[str, Any]) -> None:
        """Add the values of the hooks to a row."""
        for hook in list(self._hooks.values()):
            self._try(hook, "after_step", lambda hook=hook: self._add_values(hook, row))
        if self._hooks:
            self._states[row["step"]] = json.dumps(self.hook_states())

    def at_checkpoint(self, step: int) -> dict[str, Any]:
        """Return the states of the hooks for a checkpoint."""
        for hook in list(self._hooks.values()):
            self._try(
                hook, "at_checkpoint", lambda hook=hook: hook.at_checkpoint(self._context(step))
            )
        return self.hook_states()

    def hook_states(self) -> dict[str, Any]:
        states = {}
        for name, hook in list(self._hooks.items()):
            if type(hook).state_dict is RunHook.state_dict:
                continue
            text = self._try(
                hook, "state_dict",
                lambda hook=hook: json.dumps(dict(hook.state_dict()), allow_nan=False),
            )
            if text is not None:
                states[name] = json.loads(text)
        return states

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if (hook := self._hooks.get(name)) is None:
                self._say(
                    f"note: the saved state of hook {name} is dropped: the run has no such hook"
                )
                continue
            self._try(
                hook, "load_state_dict",
                lambda hook=hook, state=state: hook.load_state_dict(state),
            )

    def _add_values(self, hook: RunHook, row: dict[str, Any]) -> None:
        values = hook.after_step(self._context(row["step"]), MappingProxyType(row)) or {}
        for name, value in values.items():
            if not isinstance(name, str) or name in row:
                raise ValueError(f"the name {name!r} is not new in the row")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}; accepted: a number")
        row |= values

    def _context(self, step: int) -> StepContext:
        return StepContext(step, self._steps, self._folder)

    def step(self, row: Mapping[str, Any]) -> None:
        self._call("on_step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._call("on_evaluation", row)

    def checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self._call("on_checkpoint", checkpoint)

    def stopped(self, text: str) -> None:
        """Record that the run was stopped by request; ``text`` describes the saved state."""
        self._end = RunEnd("stopped", text)

    def _call(self, method: str, argument: Any) -> None:
        for callback in list(self._callbacks):
            self._try(
                callback, method, lambda callback=callback: getattr(callback, method)(argument)
            )

    def _try(self, callback: Callback, method: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call; remove the callback and return None if the call raises."""
        try:
            return call()
        except USER_CODE_RAISES as error:
            self._callbacks = [other for other in self._callbacks if other is not callback]
            self._hooks = {
                name: hook for name, hook in self._hooks.items() if hook is not callback
            }
            self._say(self._failure(type(callback).__name__, method, error))
            return None

    def _failure(self, name: str, method: str, error: BaseException) -> str:
        path = self._folder / FAILED_FILE.format(name=name)
        text = f"callback {name} failed in {method}: {type(error).__name__}: {error}"
        try:
            write_whole(path, "".join(traceback.format_exception(error)))
        except OSError as unwritten:
            return f"{text}; the run continues without it ({path}: {unwritten})"
        return f"{text}; the run continues without it. Its traceback is in {path}"


def run_callbacks(
    entries: Sequence[str | Mapping[str, Mapping[str, Any]]], others: Sequence[Callback]
) -> tuple[Callback, ...]:
    """Create the callbacks of a run in their order: the metrics of Ray, those of ``run.callbacks``
    (see :func:`named_callbacks`), and others."""
    return (import_object(RAY_METRICS)(), *named_callbacks(entries), *others)


def named_callbacks(entries: Sequence[str | Mapping[str, Mapping[str, Any]]]) -> list[Callback]:
    """Create the callbacks of ``run.callbacks``.

    Args:
        entries: a name of :data:`LOGGERS`, or ``module:Class`` of a custom :class:`Callback`; with
            arguments as ``{name: {argument: value}}``.

    Raises:
        ConfigError: names an entry with an unknown callback, invalid arguments, or a missing
            package.
    """
    return [_named(f"run.callbacks[{i}]", entry) for i, entry in enumerate(entries)]


def _named(field: str, entry: str | Mapping[str, Mapping[str, Any]]) -> Callback:
    if isinstance(entry, str):
        name, arguments = entry, {}
    else:
        if len(entry) != 1:
            raise ConfigError(f"{field} has {len(entry)} names; accepted: one, with its arguments")
        (name, arguments), = entry.items()
    if name in LOGGERS:
        target = import_object(LOGGERS[name])
    elif ":" in name:
        try:
            target = import_object(name)
        except ModelError as error:
            raise ConfigError(f"{field}: {error}") from None
    else:
        raise ConfigError(
            f"{field} is {name!r}; accepted: {', '.join(LOGGERS)}, or module:Class for a custom one"
        )
    if not (isinstance(target, type) and issubclass(target, Callback)):
        raise ConfigError(f"{field}: {name!r} is not a subclass of raymm.Callback")
    try:
        return target(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    except USER_CODE_RAISES as error:
        raise ConfigError(
            f"{field}: {name} with {dict(arguments)} raised {type(error).__name__}: {error}"
        ) from error
