"""Live modules whose weights are computed from parameters in every forward: weight norm, spectral
norm and the like, by torch's parametrizations or by the hooks that were before them."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from ray import cloudpickle
from torch import nn
from torch.nn.utils import parametrize

from raymm.errors import Error


class ComputedTensorError(Error, ValueError):
    """A module with an attribute that was computed from parameters once, which copies of the
    module cannot have."""


def computed_tensors(module: nn.Module) -> dict[int, torch.Tensor]:
    """By id, what stands in a copy of a module for tensors that forward hooks compute anew.

    Raises:
        ComputedTensorError: one that no hook computes.
    """
    found = {}
    for where, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()
        anew = {getattr(hook, "name", None) for hook in hooks}
        for name, value in vars(child).items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                continue
            if name not in anew:
                full = f"{where}.{name}" if where else name
                raise ComputedTensorError(
                    f"attribute {full!r} of {type(module).__name__} is a tensor that was computed "
                    "from parameters; compute it in the forward, or make it a parameter or a "
                    "buffer"
                )
            found[id(value)] = value.detach().to("meta")
    return found


class _Pickler(cloudpickle.Pickler):
    """Parametrized modules have classes of their own, which refuse to be pickled: what is pickled
    is the class before, and that it is parametrized."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            (base,) = type(obj).__bases__
            return base.__new__, (base,), vars(obj), None, None, _parametrize
        return super().reducer_override(obj)


def _parametrize(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def has_parametrizations(module: nn.Module) -> bool:
    """Whether any part of a module is parametrized."""
    return any(parametrize.is_parametrized(child) for child in module.modules())


def packed(module: nn.Module) -> bytes:
    """A module with parametrizations, for another process of the same run."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(module)
    return buffer.getvalue()


def unpacked(data: bytes) -> nn.Module:
    """The module again."""
    return pickle.loads(data)


def initialize_parametrized(module: nn.Module) -> None:
    """Give the originals of a parametrized module's weights what torch's own layers begin with, if
    they have no values yet (NaN)."""
    if not parametrize.is_parametrized(module):
        return
    for name, originals in module.parametrizations.items():
        given = list(originals.parameters(recurse=False))
        if not given or any(one.is_meta or not one.isnan().any() for one in given):
            continue
        for one in given:
            nn.init.ones_(one)
        weight = torch.empty_like(getattr(module, name))
        if weight.dim() > 1:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            nn.init.zeros_(weight)
        setattr(module, name, weight)
