"""Examples with doubled contents, to distinguish a part from the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.actors.probe.vlm.towers import Tower

# Relative change of numbers in the second copy.
_CHANGE = 0.3


def twice(inputs: Mapping[str, Any], towers: tuple[Tower, ...]) -> dict[str, Any]:
    """Return a batch with its rows and their items doubled."""
    entries = {entry for tower in towers for _, entry in tower.arguments}
    rows, length = inputs["input_ids"].shape[:2]
    doubled = {}
    for name, value in inputs.items():
        dim: int | None = 0
        if name not in entries:
            pairs = range(value.dim() - 1)
            dim = next((d for d in pairs if value.shape[d : d + 2] == (rows, length)), None)
        doubled[name] = value if dim is None else twice_along(value, dim)
    return doubled


def twice_along(value: Any, dim: int) -> Any:
    """Double a tensor along a dimension, with slightly different floats; zeros stay zeros.

    Equal copies would hide averages over, or attention to, both.
    """
    if not isinstance(value, torch.Tensor):
        return value
    changed = value
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        changed = value * (1 + _CHANGE * noise).to(value)
    return torch.cat([value, changed], dim)
