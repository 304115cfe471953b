"""Host memory that is available to a process, and the copies that a run makes in it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class CopyOptions(NamedTuple):
    """Copies of trained state in host memory: for asynchronous checkpoints, and for recoveries in
    place."""

    checkpoints: bool = False
    snapshots: bool = False


class HostMemory(NamedTuple):
    """Bytes of memory that processes on a node, given by Ray id and host name, can still
    allocate."""

    node: str
    name: str
    available: int


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process can still allocate: the minimum for the
    node and for its container."""
    import psutil  # only ranks that make copies need it

    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or no limit ("max")
        return available
    return min(available, limit - used + int(stat.get("inactive_file", 0)))
