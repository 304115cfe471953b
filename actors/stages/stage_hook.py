"""Stage hooks: objects of users that change the inputs or outputs of a module on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.item_shares import sample_rows
from raymm.errors import ModelError
from raymm.kernels.shared_draws import Grid, set_grid

# Entry of an encoder's inputs that says which sample an item belongs to. Hooks do not get it.
_SAMPLE_INDEX = "sample_index"


class HookCall(NamedTuple):
    """Call of a :class:`raymm.StageHook` for one microbatch.

    Attributes:
        module: name of the module.
        microbatch: number of the microbatch in the step.
        sample_ids: ids of the samples of the microbatch that the process has, if they have ids.
        training: False in evaluation and text generation.
    """

    module: str
    microbatch: int
    sample_ids: tuple[str, ...]
    training: bool


class StageHook:
    """Base class of hooks that change the inputs or the outputs of a module.

    A subclass overrides one method or both. ``model.stage_hooks`` of a configuration and
    ``add_stage_hook`` of a model attach it to an encoder. The hook runs on each rank that has the
    first stage (:meth:`inputs`) or the last stage (:meth:`output`) of the module, for each
    microbatch. Methods return new tensors of the same shape, dtype and device, and must treat each
    item separately.
    """

    def inputs(self, inputs: dict[str, Any], call: HookCall) -> dict[str, Any]:
        """Return the module's inputs by argument name; called before its callbacks."""
        return inputs

    def output(self, features: torch.Tensor, call: HookCall) -> torch.Tensor:
        """Return features (items, tokens, width) for the language model, differentiable if
        ``features`` are. Called after the projector and callbacks, for each tensor of features."""
        return features


@dataclass(frozen=True)
class StageHooks:
    """Hooks of one stage, in their order.

    Attributes:
        first: True if the stage has the module's inputs.
        last: True if the stage has the module's outputs.
    """

    module: str
    hooks: tuple[StageHook, ...]
    first: bool = True
    last: bool = True

    def changed_inputs(
        self, inputs: dict[str, Any] | None, context: MicrobatchContext
    ) -> dict[str, Any] | None:
        """Return the inputs of the module, which are None on other stages than the first."""
        hooks = _overriding(self.hooks, "inputs") if self.first and inputs is not None else ()
        if inputs is None or not hooks:
            return inputs
        changed = {name: value for name, value in inputs.items() if name != _SAMPLE_INDEX}
        set_grid(None)  # all processes have all items
        for number, hook in enumerate(hooks):
            context.enter(f"stage_hook.inputs.{number}")
            before = changed
            changed = hook.inputs(dict(before), self._call(context))
            if not isinstance(changed, dict) or changed.keys() != before.keys():
                raise ModelError(
                    f"{self._name(hook)}.inputs returned "
                    f"{sorted(changed) if isinstance(changed, dict) else type(changed).__name__}; "
                    f"accepted: a dict with {sorted(before)}"
                )
            for name, value in before.items():
                self._check(hook, f"inputs returned {name}", value, changed[name])
        return {**inputs, **changed}

    def changed_outputs(self, message: Message, context: MicrobatchContext) -> Message:
        """Return the message of the module's last stage with changed features."""
        hooks = _overriding(self.hooks, "output") if self.last else ()
        if not hooks:
            return message
        tensors = list(message.tensors)
        for number, hook in enumerate(hooks):
            context.enter(f"stage_hook.output.{number}")
            for index, features in enumerate(tensors):
                rows = sample_rows(context, self.module, len(features))
                set_grid(None if rows.is_uncut else Grid(rows))
                tensors[index] = hook.output(features, self._call(context))
                self._check(hook, "output returned", features, tensors[index])
        return message._replace(tensors=tuple(tensors))

    def _call(self, context: MicrobatchContext) -> HookCall:
        return HookCall(self.module, context.microbatch, context.own_ids, context.training)

    def _name(self, hook: StageHook) -> str:
        return f"stage hook {type(hook).__qualname__} of {self.module!r}: {type(hook).__name__}"

    def _check(self, hook: StageHook, returned: str, before: Any, after: Any) -> None:
        """Raise a ModelError if a hook returns another kind of value than it got."""
        if not isinstance(before, torch.Tensor):
            return
        if not isinstance(after, torch.Tensor) or _kind(after) != _kind(before):
            actual = _kind(after) if isinstance(after, torch.Tensor) else type(after).__name__
            raise ModelError(f"{self._name(hook)}.{returned} {actual}; accepted: {_kind(before)}")
        if before.requires_grad and torch.is_grad_enabled() and not after.requires_grad:
            raise ModelError(
                f"{self._name(hook)}.{returned} without a gradient; accepted: a differentiable "
                "function of the features"
            )


def _kind(tensor: torch.Tensor) -> str:
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}"


def overrides(hook: StageHook, method: str) -> bool:
    """Return True if a hook's class implements a method of :class:`StageHook`."""
    return getattr(type(hook), method) is not getattr(StageHook, method)


def _overriding(hooks: Sequence[StageHook], method: str) -> tuple[StageHook, ...]:
    return tuple(hook for hook in hooks if overrides(hook, method))


def check_stage_hook(hook: Any) -> None:
    """Raise a ModelError if an object is no stage hook, changes nothing, or has parameters."""
    name = type(hook).__qualname__
    if not isinstance(hook, StageHook):
        raise ModelError(f"{name} is not a subclass of raymm.StageHook; accepted: its objects")
    if not any(overrides(hook, method) for method in ("inputs", "output")):
        raise ModelError(f"{name} overrides no method; accepted: inputs, output, or both")
    values = [hook, *vars(hook).values()]
    parameters = [value for value in values if isinstance(value, torch.Tensor)]
    for value in values:
        if isinstance(value, torch.nn.Module):
            parameters += value.parameters()
    if any(parameter.requires_grad for parameter in parameters):
        raise ModelError(
            f"{name} has parameters that require a gradient, which no optimizer would train; "
            "accepted: tensors without a gradient (train them as part of a module)"
        )
