"""Probe of state: does a forward depend on earlier forwards?

Stages run microbatches in a layout-dependent order, recompute some, run evaluation in between, and
restart after failures. Results must therefore not depend on earlier forwards. A small copy runs on
inputs A, on other inputs B in training and in evaluation, and on A again, with the same random
numbers and state dict: both results must be equal. Caches that do not change results are accepted,
and so are persistent buffers (running statistics, vectors of spectral norms), which checkpoints
contain. Rotary embeddings run as in stages (:mod:`raymm.actors.modules.rotary`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from raymm.actors.modules.brief_error import because
from raymm.actors.modules.rotary import RotaryState
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.quota.generators import generators_kept, seed_generators
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

# Tolerance, relative to the largest value of a result.
_ROUNDING = 1e-6
_SHOWN = 3
_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


def check_history(
    name: str, model: nn.Module, trains: bool, run: Callable[[nn.Module, bool], torch.Tensor]
) -> None:
    """Check that a module's result does not depend on earlier forwards.

    Args:
        name: module name, for the error.
        model: a small copy; not modified.
        trains: True if the module runs in training mode.
        run: ``run(model, other)`` is a forward on inputs A, or on inputs B if ``other``.

    Raises:
        ProbeError: the result depends on them; names the attributes and buffers that forwards
            change.
        NotRunError: the copy does not run.
    """
    model = trial_copy(model)
    RotaryState(model)

    def result(training: bool, other: bool) -> torch.Tensor:
        seed_generators(0)
        return run(model.train(training), other)

    with torch.no_grad(), generators_kept():
        try:
            saved = copy.deepcopy(model.state_dict())
            initial = _state(model)
            first = result(trains, False)
            between = _state(model)
            for training in {trains, False}:
                result(training, True)
            final = _state(model)
            model.load_state_dict(saved)
            again = result(trains, False)
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise NotRunError(
                f"{name!r} does not run on its trial inputs{because(error)}"
            ) from error
    limit = _ROUNDING * float(first.abs().max()) if first.numel() else 0.0
    if first.shape == again.shape and torch.allclose(
        first, again, rtol=0, atol=limit, equal_nan=True
    ):
        return
    changed = [
        key for key in final
        if key not in saved
        and not (_equal(initial.get(key), final[key]) and _equal(between.get(key), final[key]))
    ]
    shown = ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")
    raise ProbeError(
        f"Cannot run {name!r}: a forward of {type(model).__name__} depends on earlier forwards, "
        f"which change {shown or 'something outside its modules'}. The result would depend on the "
        "layout, on evaluation and on recomputation. Accepted are modules that compute from their "
        "inputs, parameters and persistent buffers; freeze the module if this is in training only"
    )


def other_values(inputs: Any) -> Any:
    """Return inputs of the same shapes with other floats; ids and masks are unchanged."""
    return tree_map_only(
        torch.Tensor, lambda value: 2 * value + 1 if value.is_floating_point() else value, inputs
    )


def _state(model: nn.Module) -> dict[str, list[Any]]:
    """Return copies of the modules' values, by dotted name."""
    return {
        f"{path}.{name}".lstrip("."): [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in tree_leaves(value) if isinstance(leaf, (torch.Tensor, *_PLAIN))
        ]
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers, vars(module))
        for name, value in held.items()
        if held is not vars(module) or name not in _INTERNAL
    }


def _equal(first: list[Any] | None, second: list[Any]) -> bool:
    """Compare leaves; tensors by their values."""
    return first is not None and len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype
        else type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b
        for a, b in zip(first, second, strict=True)
    )
