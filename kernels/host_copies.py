"""Small device tensors whose values the host keeps, so that reading them needs no device sync.

Token ids, labels and item indices of a step come from the host. When such a tensor is copied to a
GPU, the copy keeps a reference to the host tensor, and :func:`on_host` returns that reference at
once. Copies use pinned memory and run in stream order, so the host does not wait for them.
"""

from __future__ import annotations

from typing import Any

import torch

_COPY = "_raymm_host_copy"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device without waiting, and remember its values for :func:`on_host`.

    A tensor that is already on the device is returned unchanged. The values are forgotten when the
    copy is modified in place.
    """
    if tensor.device.type == device.type:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    moved = pinned.to(device, non_blocking=True)
    remember(moved, tensor)
    return moved


def remember(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Attach a host tensor with the same values to a device tensor, for :func:`on_host`."""
    marked: Any = tensor
    setattr(marked, _COPY, (host, tensor._version))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the host; wait for the device if the host has no copy."""
    if tensor.device.type == "cpu":
        return tensor
    host, version = getattr(tensor, _COPY, (None, -1))
    return host if host is not None and version == tensor._version else tensor.cpu()
