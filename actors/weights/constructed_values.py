"""Initial values of parameters that a model class sets only in its constructor.

``_init_weights`` omits constants of activations, parametrizations, and other libraries' layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import PretrainedConfig, PreTrainedModel

# Tensors with at most this many elements are always allocated.
_SMALL = 4096


class _RealTensors(TorchFunctionMode):
    """Allocates small tensors and those of given shapes on the CPU, the others on the meta device.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = frozenset(shapes)
        self._constructors = _device_constructors()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._constructors and kwargs.get("device") is None:
            shape = _shape(args, kwargs)
            real = shape is None or shape in self._shapes or torch.Size(shape).numel() <= _SMALL
            kwargs = {**kwargs, "device": "cpu" if real else "meta"}
        return function(*args, **kwargs)


def _shape(args: tuple, kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that a tensor constructor is called with; None if it gets values."""
    sizes = kwargs.get("size", args)
    if len(sizes) and isinstance(sizes[0], list | tuple | torch.Size):
        sizes = sizes[0]
    return tuple(sizes) if all(type(size) is int for size in sizes) and len(sizes) else None


def constructed_values(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    shapes: Collection[tuple[int, ...]],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return constructor values of parameters that are small or have one of the given shapes.

    Other parameters take no memory. The values depend on ``shapes``, but not on the part of the
    model that the caller builds.
    """
    with torch.random.fork_rng(devices=[]), _RealTensors(shapes):
        torch.default_generator.manual_seed(seed)
        model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }
