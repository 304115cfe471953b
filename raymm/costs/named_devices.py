"""Devices as others name them: drivers, torch, Ray."""

from __future__ import annotations

import re

import torch

from raymm.scheduler.costs.devices import DEVICES, DeviceSpec

CPU = "cpu"
# What a GPU that raymm has no data of is taken for.
DEFAULT_GPU = "A100-80GB"


def device_called(name: str) -> DeviceSpec | None:
    """The device that a driver, torch or Ray calls by some name, such as ``"NVIDIA H100 80GB
    HBM3"`` or ``"A100-40G"``; None if raymm has no data of it."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    words += [a + b for a, b in zip(words, words[1:], strict=False)]
    words = [re.sub(r"(\d)gb?$", r"\1gb", word) for word in words]
    best: tuple[int, DeviceSpec] | None = None
    for device_name, device in DEVICES.items():
        parts = device_name.lower().split("-")
        # A name without a size ("A100") is that of the smallest.
        matching = sum(part in words for part in parts) if parts[0] in words else 0
        if matching and (best is None or matching > best[0]):
            best = matching, device
    return best and best[1]


def cluster_device(device: str) -> tuple[str, str | None]:
    """(name, note): the device of the connected cluster as raymm's table calls it, and what to
    say if it is not in there.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    from raymm.actors.placement.node_types import reachable_resources

    if device == "cpu":
        return "cpu", None
    prefix = "accelerator_type:"
    names = [key.removeprefix(prefix) for key in reachable_resources() if key.startswith(prefix)]
    if torch.cuda.is_available():
        names.insert(0, torch.cuda.get_device_name(0))
    for name in names:
        if (spec := device_called(name)) is not None:
            return spec.name, None
    return DEFAULT_GPU, (
        f"the cluster's GPUs ({', '.join(names) or 'of unknown type'}) are not in raymm's table; "
        f"planned as {DEFAULT_GPU}. planning.device names another, planning.profile has measured "
        "costs"
    )
