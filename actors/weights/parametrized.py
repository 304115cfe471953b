"""Live modules whose weights are computed from parameters in every forward: weight norm, spectral
norm and the like, by torch's parametrizations or by the hooks that were before them."""

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

# Hooks that were before parametrizations, and what removes them.
_HOOKS = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def computed_tensors(module: nn.Module) -> dict[int, torch.Tensor]:
    """By id, what stands in a replica of a module for tensors that forward hooks compute anew.

    Raises:
        ModelError: one that no hook computes.
    """
    tensors = {}
    for where, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()
        anew = {getattr(hook, "name", None) for hook in hooks}
        for name, value in vars(child).items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                continue
            if name not in anew:
                full = f"{where}.{name}" if where else name
                raise ModelError(
                    f"attribute {full!r} of {type(module).__name__} is a tensor that was computed "
                    "from parameters; compute it in the forward, or make it a parameter or a "
                    "buffer"
                )
            tensors[id(value)] = value.detach().to("meta")
    return tensors


def _reduce_parametrized(obj: Any) -> Any:
    """Parametrized modules have classes of their own, which refuse to be pickled: what is pickled
    is the class before, and that it is parametrized."""
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        (base,) = type(obj).__bases__
        return base.__new__, (base,), vars(obj), None, None, _parametrize
    return NotImplemented


def _parametrize(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    _give_class(module)


def _give_class(module: nn.Module) -> None:
    """A parametrized module's class, of its own, in place of the one before."""
    parametrize._inject_new_class(module)
    for name in cast(nn.ModuleDict, module.parametrizations):
        parametrize._inject_property(module, name)


def has_parametrizations(module: nn.Module) -> bool:
    """Whether any part of a module is parametrized."""
    return any(parametrize.is_parametrized(child) for child in module.modules())


def computes_weights(module: nn.Module) -> bool:
    """Whether any weight of a module is computed in every forward."""
    hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
    return has_parametrizations(module) or any(type(hook) in _HOOKS for hook in hooks)


def packed(module: nn.Module) -> bytes:
    """A module with parametrizations, for another process of the same run."""
    from ray import cloudpickle  # stages of other modules are built without Ray

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce_parametrized(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    buffer = io.BytesIO()
    Pickler(buffer).dump(module)
    return buffer.getvalue()


def unpacked(data: bytes) -> nn.Module:
    """The module again."""
    return pickle.loads(data)


def initialize_parametrized(module: nn.Module) -> None:
    """Give the originals of a parametrized module's weights what torch's own layers begin with, if
    they have no values yet (NaN)."""
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
    """A copy in which weights that are computed in every forward are what was computed, but those
    that ``plain``, a module of the same class as it comes (on meta), computes too. Otherwise the
    class would find none of them in a file, and begin with random ones."""
    computed = {
        id(value): value.detach().clone() for child in module.modules()
        for value in vars(child).values()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }
    copied = copy.deepcopy(module, computed).eval()  # spectral norm: without another iteration
    others = dict(plain.named_modules())
    with torch.no_grad():
        for where, child in copied.named_modules():
            _compute_once(child, others.get(where))
    return copied


def _compute_once(child: nn.Module, plain: nn.Module | None) -> None:
    for hook in list(child._forward_pre_hooks.values()):
        remove = _HOOKS.get(type(hook))
        if remove is not None and hook.name in getattr(plain, "_parameters", ()):
            remove(child, hook.name)
    if not parametrize.is_parametrized(child):
        return
    (child.__class__,) = type(child).__bases__  # copies share it, and it has the properties
    _give_class(child)
    parametrizations = child.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    for name in list(parametrizations):
        if name in getattr(plain, "_parameters", ()):
            parametrize.remove_parametrizations(child, name, leave_parametrized=True)
