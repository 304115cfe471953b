"""Initial values of parameters that a model class gives in its constructor only.

``_init_weights``, by which every submodule of a skeleton on the meta device is initialised, does
not know all of them: constants of activations, parametrizations, layers of other libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import PretrainedConfig, PreTrainedModel

# Tensors of at most so many elements are made for real, whatever they are for.
_SMALL = 4096


class _RealTensors(TorchFunctionMode):
    """Makes tensors of some shapes and small ones for real, the others on the meta device."""

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
    """What a function that makes tensors is asked for; None where values are given."""
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
    """Parameters as the constructor leaves them, of these shapes and of few elements; large ones
    of other shapes take no memory, and are not returned.

    The same whatever part of the model is asked for, as long as ``shapes`` are.

    Args:
        model_class: of transformers.
        config: of the model; it is not changed.
        shapes: of parameters whose values are wanted, besides small ones.
        seed: of what the constructor draws.
    """
    with torch.random.fork_rng(devices=[]), _RealTensors(shapes):
        torch.default_generator.manual_seed(seed)
        model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }
