"""Inspection of processes through /proc."""

import os
import signal
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

# State of a TCP socket in /proc/net/tcp.
LISTEN = 10


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    result = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                result[int(entry.name)] = int(fields[1])
    return result


def descendants(pid: int) -> set[int]:
    """Return the children of a process and their descendants."""
    found, table = {pid}, parents()
    while more := {child for child, parent in table.items() if parent in found} - found:
        found |= more
    return found - {pid}


def titles(pids: set[int]) -> dict[int, str]:
    """Return the command line of every process that still exists."""
    result = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        result[pid] = text
    return result


def ranks_of(driver: int) -> list[int]:
    """Return the process ids of the ranks of a driver with an embedded Ray."""
    return sorted(
        pid for pid, title in titles(descendants(driver)).items() if "ray::RankActor" in title
    )


def listening(pids: set[int]) -> set[str]:
    """Return the addresses of TCP sockets on which processes listen."""
    found, inodes = set(), set()
    for pid in pids:
        for file in (Path(f"/proc/{pid}/fd").iterdir() if Path(f"/proc/{pid}").is_dir() else ()):
            try:
                inodes.add(os.readlink(file))
            except OSError:
                continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *more = line.split()
            if int(state, 16) == LISTEN and f"socket:[{more[5]}]" in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ip_address(turned)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition, and fail with a message after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.02)


def all_gone(pids: set[int]) -> bool:
    """Return True if none of the processes exists."""
    return not pids & set(parents())


def end_group(pid: int) -> None:
    """Kill a process group that a test started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
