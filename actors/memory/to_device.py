"""Inputs of a stage, on their way to the device that runs it."""

from __future__ import annotations

from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it, in dicts too, on a device; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
