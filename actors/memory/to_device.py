"""Inputs of a stage, on their way to the device that runs it."""

from __future__ import annotations

from typing import Any

import torch

from raymm.kernels import host_copies


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it, in dicts too, on a device, as
    :func:`raymm.kernels.host_copies.to_device`; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return host_copies.to_device(value, device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
