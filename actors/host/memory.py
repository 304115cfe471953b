"""Host memory that a process can still have, and the copies in it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class CopyOptions(NamedTuple):
    """Which copies of what trains a run makes in host memory.

    Attributes:
        checkpoints: of asynchronous checkpoints.
        snapshots: for recoveries in place.
    """

    checkpoints: bool = False
    snapshots: bool = False


class HostMemory(NamedTuple):
    """Memory of a node.

    Attributes:
        node: Ray's id of it.
        name: of the host.
        available: bytes that processes there can still have.
    """

    node: str
    name: str
    available: int


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process can still have: of the node's, or of its
    container's, whichever is less.

    Args:
        cgroup: folder of the container's control group (version 2).
    """
    import psutil  # a rank that makes no copies does not need it

    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return min(available, limit - used + int(stat.get("inactive_file", 0)))
