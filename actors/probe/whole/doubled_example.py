"""An example of which there is everything twice, so that a part of it can be told from all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.actors.probe.whole.towers import Tower

# Of numbers in a second copy.
_CHANGE = 0.3


def twice(inputs: Mapping[str, Any], towers: tuple[Tower, ...]) -> dict[str, Any]:
    """A batch whose rows come twice, with their items.

    Args:
        inputs: of the whole model.
        towers: whose items they have.
    """
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
    """Twice along a dimension, numbers of the second a little different: an average over all of
    two copies alike, or attention to all of them, would be that of either. Zeros stay such.

    Args:
        value: a tensor; anything else is returned as it is.
        dim: the dimension.
    """
    if not isinstance(value, torch.Tensor):
        return value
    other = value
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        other = value * (1 + _CHANGE * noise).to(value)
    return torch.cat([value, other], dim)
