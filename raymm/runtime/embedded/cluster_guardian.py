"""The process that ends an embedded Ray with its driver, however the driver ends.

Ray's own servers die with the process that started them, but what these start (agents, workers)
finds out by itself, or does not. The guardian waits for the driver's end and then kills every
process that writes into the driver's Ray session. Run as a script, with nothing but Python's own
modules: it must cost nothing.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

# Seconds between two looks at the driver, and at what is left of its cluster.
INTERVAL_S = 0.2
# Seconds after which processes that cannot be killed are left to themselves.
PATIENCE_S = 30.0


def session_processes(driver: int) -> set[int]:
    """Processes that write into the Ray session of a driver, and their descendants; without this
    process and the driver.

    Args:
        driver: process id; Ray names sessions by time and process id.
    """
    session = re.compile(rf"/session_[^/]*_{driver}(/|$)")
    parents = _parents()
    processes = {pid for pid in parents if _writes_into(pid, session)} - {driver, os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in processes} - processes:
        processes |= more
    return processes - {driver, os.getpid()}


def end_session(driver: int) -> None:
    """Kill them, until there are none left."""
    deadline = time.monotonic() + PATIENCE_S
    clean = 0  # looks in a row that found nothing: a process may be between fork and exec
    while clean < 3 and time.monotonic() < deadline:
        left = session_processes(driver)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        clean = 0 if left else clean + 1
        time.sleep(INTERVAL_S)


def _parents() -> dict[int, int]:
    """Parent of every process that has not ended."""
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
    """Whether a process has a file below the session's folder open for writing. By open files and
    not by titles, which Ray overwrites; and not by reading, which a person may do too."""
    try:
        for file in os.scandir(f"/proc/{pid}/fd"):
            if file.stat(follow_symlinks=False).st_mode & 0o200:
                target = os.readlink(file.path)
                if target.startswith("/") and session.search(target):
                    return True
    except OSError:  # it has ended, or is another user's
        pass
    return False


def main(driver: int) -> None:
    """Wait for the end of a driver, which is this process's parent, and end its Ray session."""
    while os.getppid() == driver:
        time.sleep(INTERVAL_S)
    end_session(driver)


if __name__ == "__main__":
    main(int(sys.argv[1]))
