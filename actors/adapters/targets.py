"""Choice of the layers that get adapters."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora_config import ALL_LINEAR, LoraConfig
from raymm.errors import ModelError

# Largest number of names in an error.
_SHOWN = 6


def find_targets(
    module: nn.Module, config: LoraConfig, among: Callable[[str], bool] = lambda _: True,
    part: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """Return the names of the linear layers that get adapters, in the module's order. Raise a
    ``ModelError`` if an entry of ``targets`` matches no layer, or a layer that is not linear.

    Args:
        among: returns True for names of layers in the adapted part.
        part: name of that part, for errors; empty for the whole module.
    """
    where = f"part {part!r} of " * bool(part) + type(module).__name__
    names = {name: child for name, child in module.named_modules() if name and among(name)}
    linear = [name for name, child in names.items() if is_adaptable(child)]
    if config.targets == ALL_LINEAR:
        get = getattr(module, "get_output_embeddings", None)
        head = get() if get else None
        layers = [name for name in linear if names[name] is not head]
        if not layers:
            raise ModelError(
                f"targets is {ALL_LINEAR!r}, but {where} has no linear layer that "
                "supports adapters; train it without adapters"
            )
        return tuple(layers)
    patterns = [config.targets] if isinstance(config.targets, str) else config.targets
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if _matches(name, pattern, config)]
        if not matched:
            shown = ", ".join(linear[:_SHOWN]) + (", ..." if len(linear) > _SHOWN else "")
            raise ModelError(
                f"targets has {pattern!r}, which matches no layer of {where}; "
                f"accepted: {ALL_LINEAR!r}, or names of linear layers: {shown or 'it has none'}"
            )
        for name in matched:
            if not is_adaptable(names[name]):
                raise ModelError(
                    f"targets has {pattern!r}, but {name!r} is a {type(names[name]).__name__}; "
                    "accepted: nn.Linear, and Conv1D of transformers"
                )
        chosen.update(matched)
    return tuple(name for name in linear if name in chosen)


def _matches(name: str, pattern: str, config: LoraConfig) -> bool:
    if isinstance(config.targets, str):
        try:
            return re.fullmatch(pattern, name) is not None
        except re.error as error:
            raise ModelError(
                f"targets is {pattern!r}, which is not a valid regular expression: {error}"
            ) from None
    return name == pattern or name.endswith(f".{pattern}")


def is_adaptable(module: nn.Module) -> bool:
    """Return True if a layer can get an adapter. Subclasses cannot: they may use their weight
    differently."""
    return type(module) in (nn.Linear, Conv1D)
