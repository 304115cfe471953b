"""Small tensors that host and device both know, so that nobody has to wait to read one.

What a step is made of (token ids, labels, whose items are whose) comes from the host. Where it
goes to a GPU, the tensor there keeps what the host had: :func:`on_host` gives it back at once.
Copies to a GPU are from pinned memory, in the order of its work: the host does not wait for them.
"""

from __future__ import annotations

from typing import Any

import torch

_COPY = "_raymm_host_copy"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on a device, which nobody waits for. Its values stay known to the
    host, until they are changed there.

    Args:
        tensor: any; one that is on the device is returned as it is.
        device: where it is to be.
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
    """Keep with a tensor what the host knows of it.

    Args:
        tensor: on a device.
        host: of the same values.
    """
    marked: Any = tensor
    setattr(marked, _COPY, (host, tensor._version))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values where the host can read them: what it knows of it, if it does. Else, waits
    for the device."""
    if tensor.device.type == "cpu":
        return tensor
    host, version = getattr(tensor, _COPY, (None, -1))
    return host if host is not None and version == tensor._version else tensor.cpu()
