"""Devices by the names that drivers, torch and Ray have for them."""

from __future__ import annotations

import re

from raymm.actors.host.gpus import read_gpus
from raymm.scheduler.costs.devices import DEVICES, DeviceSpec, find_device

CPU = "cpu"
# Device that stands in for an unknown GPU.
DEFAULT_GPU = "A100-80GB"


def device_called(name: str) -> DeviceSpec | None:
    """Return the device that a driver, torch or Ray names, such as ``"NVIDIA H100 80GB HBM3"`` or
    ``"A100-40G"``; None for an unknown device."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    words += [a + b for a, b in zip(words, words[1:], strict=False)]
    words = [re.sub(r"(\d)gb?$", r"\1gb", word) for word in words]
    best: tuple[int, DeviceSpec] | None = None
    for device_name, device in DEVICES.items():
        terms = device_name.lower().split("-")
        # A name without a memory size ("A100") stands for the smallest one.
        matching = sum(term in words for term in terms) if terms[0] in words else 0
        if matching and (best is None or matching > best[0]):
            best = matching, device
    return best and best[1]


def precision_notes(device: str, precision: str) -> list[str]:
    """Return a line on the cost of ``"fp32"`` on the cluster's GPUs, or nothing for other
    settings."""
    if device == CPU or precision != "fp32":
        return []
    name, unknown = cluster_device(device)
    if unknown:
        return ["note: run.precision is 'fp32': matrix products do not use tensor cores"]
    fp32, bf16 = (find_device(name).peak(dtype) for dtype in ("fp32", "bf16"))
    return [
        f"note: run.precision is 'fp32': matrix products run at up to {fp32 / 1e12:.0f} TFLOP/s on "
        f"{name}, with 'bf16' at {bf16 / 1e12:.0f} ({bf16 / fp32:.0f} times as fast)"
    ]


def device_names(device: str) -> list[str]:
    """Return the names of the connected cluster's GPUs: this node's first GPU by its driver, then
    the GPU types of Ray. Empty for ``"cpu"``."""
    from raymm.actors.placement.node_types import reachable_resources

    if device == CPU:
        return []
    prefix = "accelerator_type:"
    names = [key.removeprefix(prefix) for key in reachable_resources() if key.startswith(prefix)]
    if (gpus := read_gpus()) is not None:
        names[:0] = gpus.names[:1]
    return names


def cluster_device(device: str) -> tuple[str, str | None]:
    """Return the name of the connected cluster's device (``"cpu"`` or ``"cuda"``) in raymm's table,
    and a note if the table does not have it."""
    if device == CPU:
        return CPU, None
    names = device_names(device)
    for name in names:
        if (spec := device_called(name)) is not None:
            return spec.name, None
    return DEFAULT_GPU, (
        f"the cluster's GPUs ({', '.join(names) or 'of unknown type'}) are not in raymm's table; "
        f"planning for {DEFAULT_GPU}. Set planning.device to another device, or planning.profile "
        "to measured costs"
    )
