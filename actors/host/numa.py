"""Binding of a process to the NUMA node of its GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def bind_to_gpu_node(device: torch.device, sys: Path = Path("/sys")) -> int | None:
    """Bind all threads of this process to the CPUs of its GPU's NUMA node, without excluded CPUs.
    Linux then allocates memory that they touch first on that node.

    Returns:
        The NUMA node; None if it is unknown, or the process may use none of its CPUs.
    """
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (
        getattr(properties, f"pci_{field}_id") for field in ("domain", "bus", "device")
    )
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int((sys / f"bus/pci/devices/{address}/numa_node").read_text())
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return None
    cpus: set[int] = set()
    for field in filter(None, text.strip().split(",")):
        first, _, last = field.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0) & cpus
    if node < 0 or not allowed:
        return None
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), allowed)
        except ProcessLookupError:  # the thread has ended meanwhile
            continue
    return node
