"""Processes of a driver's Ray session, found by the files that they write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymm.runtime.embedded import cluster_guardian
from raymm.runtime.embedded.cluster_guardian import end_session, session_processes

# Opens a file in the mode that is given, starts a child without it, and waits.
CODE = (
    "import subprocess, sys, time; file = open(sys.argv[1], sys.argv[2]);"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(child.pid, flush=True); time.sleep(60)"
)


@pytest.fixture
def session(tmp_path):
    """Return a function that starts a process with a file of a session, and its child."""
    processes = []

    def start(name: str, mode: str = "a") -> tuple[int, int]:
        folder: Path = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "log").touch()
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(folder / "log"), mode], stdout=subprocess.PIPE
        )
        processes.append(process)
        return process.pid, int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_writers_of_a_session_and_their_children_are_ended(session, monkeypatch) -> None:
    monkeypatch.setattr(cluster_guardian, "INTERVAL_S", 0.01)
    driver = 10**7  # no process has this number
    own = session(f"session_2026_{driver}")
    others = session(f"session_2026_{driver}1"), session(f"session_2026_{driver}", "r")
    assert session_processes(driver) == set(own)
    end_session(driver)
    assert not session_processes(driver)
    for pid, child in others:
        os.kill(pid, 0)
        os.kill(child, 0)
        os.kill(child, 9)


def test_the_driver_is_spared(session, tmp_path) -> None:
    """This process writes into its session, too."""
    started = set(session(f"session_2026_{os.getpid()}"))
    with (tmp_path / f"session_2026_{os.getpid()}" / "log").open("a"):
        found = session_processes(os.getpid())  # with those of the tests' own cluster, if any
    assert found >= started and os.getpid() not in found
