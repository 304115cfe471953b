"""Guardian process that ends an embedded Ray when its driver ends, however the driver ends.

Ray's own servers die with the process that started them, but agents and workers may outlive the
servers. The guardian waits for the end of the driver and then kills every process that writes into
the driver's Ray session. It runs as a script and imports only Python's own modules, to cost little
memory.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

# Seconds between two checks of the driver, and of the remaining processes.
INTERVAL_S = 0.2
# Seconds after which processes that cannot be killed are abandoned.
PATIENCE_S = 30.0


def session_processes(driver: int) -> set[int]:
    """Return the processes that write into a driver's Ray session, and their descendants, without
    this process and the driver.

    Args:
        driver: process id. Ray names sessions by time and process id.
    """
    session = re.compile(rf"/session_[^/]*_{driver}(/|$)")
    parents = _parents()
    processes = {pid for pid in parents if _writes_into(pid, session)} - {driver, os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in processes} - processes:
        processes |= children
    return processes - {driver, os.getpid()}


def end_session(driver: int) -> None:
    """Kill the processes of a driver's Ray session until none are left."""
    deadline = time.monotonic() + PATIENCE_S
    clean = 0  # consecutive checks without processes; one may be between fork and exec
    while clean < 3 and time.monotonic() < deadline:
        remaining = session_processes(driver)
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        clean = 0 if remaining else clean + 1
        time.sleep(INTERVAL_S)


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    return parents


def _writes_into(pid: int, session: re.Pattern[str]) -> bool:
    """Return True if a process has a file below the session's folder open for writing. Ray
    overwrites process titles, and users may read logs."""
    try:
        for file in os.scandir(f"/proc/{pid}/fd"):
            if file.stat(follow_symlinks=False).st_mode & 0o200:
                target = os.readlink(file.path)
                if target.startswith("/") and session.search(target):
                    return True
    except OSError:  # the process has ended, or belongs to another user
        pass
    return False


def main(driver: int) -> None:
    """Wait until the driver, this process's parent, ends. Then end its Ray session."""
    while os.getppid() == driver:
        time.sleep(INTERVAL_S)
    end_session(driver)


if __name__ == "__main__":
    main(int(sys.argv[1]))
