"""Live modules that compute weights from parameters in every forward (weight norm, spectral norm).

Both torch's parametrizations and the older hooks are supported.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from raymm.errors import ModelError

# Older hooks and the functions that remove them.
_HOOKS = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def computed_tensors(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return, by id, meta replacements of tensors that forward hooks recompute, for deep copies.
    Raise a ``ModelError`` if a computed tensor is not recomputed by a hook."""
    tensors = {}
    for path, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()
        recomputed = {getattr(hook, "name", None) for hook in hooks}
        for name, value in vars(child).items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                continue
            if name not in recomputed:
                full = f"{path}.{name}" if path else name
                raise ModelError(
                    f"attribute {full!r} of {type(module).__name__} is a tensor that was computed "
                    "from parameters; compute it in the forward, or make it a parameter or a "
                    "buffer"
                )
            tensors[id(value)] = value.detach().to("meta")
    return tensors


def _reduce_parametrized(obj: Any) -> Any:
    """Pickle a parametrized module by its original class, as its generated class refuses pickling.
    """
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        (base,) = type(obj).__bases__
        return base.__new__, (base,), vars(obj), None, None, _parametrize
    return NotImplemented


def _parametrize(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    _give_class(module)


def _give_class(module: nn.Module) -> None:
    """Restore the generated class of a parametrized module."""
    parametrize._inject_new_class(module)
    for name in cast(nn.ModuleDict, module.parametrizations):
        parametrize._inject_property(module, name)


def has_parametrizations(module: nn.Module) -> bool:
    """Return True if any part of a module is parametrized."""
    return any(parametrize.is_parametrized(child) for child in module.modules())


def computes_weights(module: nn.Module) -> bool:
    """Return True if any weight of a module is computed in every forward."""
    hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
    return has_parametrizations(module) or any(type(hook) in _HOOKS for hook in hooks)


def packed(module: nn.Module) -> bytes:
    """Pickle a module with parametrizations for another process of the same run."""
    from ray import cloudpickle  # imported here because other modules are built without Ray

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce_parametrized(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    buffer = io.BytesIO()
    Pickler(buffer).dump(module)
    return buffer.getvalue()


def unpacked(data: bytes) -> nn.Module:
    """Invert :func:`packed`."""
    return pickle.loads(data)


def initialize_parametrized(module: nn.Module) -> None:
    """Initialise uninitialised (NaN) originals of parametrized weights as torch's own layers do."""
    if not parametrize.is_parametrized(module):
        return
    for name, originals in cast(nn.ModuleDict, module.parametrizations).items():
        parameters = list(originals.parameters(recurse=False))
        if not parameters or any(p.is_meta or not p.isnan().any() for p in parameters):
            continue
        for parameter in parameters:
            nn.init.ones_(parameter)
        weight = torch.empty_like(getattr(module, name))
        if weight.dim() > 1:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            nn.init.zeros_(weight)
        setattr(module, name, weight)


Built = TypeVar("Built", bound=nn.Module)


def with_weights_of_its_class(module: Built, plain: nn.Module) -> Built:
    """Return a copy that stores computed weights as plain ones, unless ``plain`` computes them,
    too. ``plain`` is a new module of the same class, on meta, which reads weights from files."""
    computed = {
        id(value): value.detach().clone() for child in module.modules()
        for value in vars(child).values()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }
    copied = copy.deepcopy(module, computed).eval()  # eval: spectral norm must not iterate again
    plain_modules = dict(plain.named_modules())
    with torch.no_grad():
        for path, child in copied.named_modules():
            _compute_once(child, plain_modules.get(path))
    return copied


def _compute_once(child: nn.Module, plain: nn.Module | None) -> None:
    for hook in list(child._forward_pre_hooks.values()):
        remove = _HOOKS.get(type(hook))
        if remove is not None and hook.name in getattr(plain, "_parameters", ()):
            remove(child, hook.name)
    if not parametrize.is_parametrized(child):
        return
    # copies share the generated class, which has the properties
    (child.__class__,) = type(child).__bases__
    _give_class(child)
    parametrizations = child.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    for name in list(parametrizations):
        if name in getattr(plain, "_parameters", ()):
            parametrize.remove_parametrizations(child, name, leave_parametrized=True)
