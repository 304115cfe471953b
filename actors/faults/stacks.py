"""Stacks of a process, even if it holds the interpreter's lock or waits in C code: on a signal, C
code writes them to an unnamed file, which is reached through the process's descriptor."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from raymm.actors.faults.flight_recorder import records

# Signal that makes a process of raymm write its stacks.
STACKS_SIGNAL = signal.SIGUSR2
# Seconds to wait for the stacks, and between two checks for them. Stopped processes are skipped; an
# error message waits for the stacks of the others.
STACKS_TIMEOUT_S, STACKS_LOOK_S = 1.0, 0.05
# Bytes at the end of a log that are searched for the cause of the process's end.
LOG_TAIL_BYTES = 64 * 1024

_STATES = {
    "R": "computing", "S": "sleeping", "D": "waiting for a disk", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead", "X": "dead",
}  # fmt: skip


class Address(NamedTuple):
    """Location of a process's stacks.

    Attributes:
        descriptor: file descriptor of the stack file in the process.
        errors: path of the log for the process's standard error on its node; empty if unknown.
    """

    node: str
    pid: int
    descriptor: int
    errors: str = ""


class Look(NamedTuple):
    """Process as seen from outside: its state in the operating system, the stacks of its threads,
    files of NCCL's flight recorder, and True in ``aborted`` if SIGABRT ended it."""

    state: str
    stacks: str
    records: tuple[str, ...] = ()
    aborted: bool = False


class StackFile:
    """File in which this process stores its stacks on :data:`STACKS_SIGNAL`."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()


def look_at(address: Address) -> Look:
    """Inspect a process of this node from outside. Never raises: the result describes errors."""
    try:
        letter = Path(f"/proc/{address.pid}/stat").read_text().rpartition(")")[2].split()[0]
        state = _STATES.get(letter, letter)
        stacks = "" if letter in "TtZX" else _stacks(address)
    except OSError as error:
        gone = not Path(f"/proc/{address.pid}").exists() and Path("/proc").is_dir()
        state, stacks = "dead" if gone else f"unknown ({error})", ""
    return Look(state, stacks, records(address.pid), _aborted(address.errors))


def error_log() -> str:
    """Return the path of the file that receives this process's standard error; empty if unknown."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""


def _aborted(errors: str) -> bool:
    """Return True if a log ends with the message of Python's fault handler for SIGABRT, which Ray
    enables."""
    try:
        with Path(errors).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return b"Fatal Python error: Aborted" in stream.read()
    except OSError:  # unknown, or a pipe
        return False


def _stacks(address: Address) -> str:
    file = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
    start_size = size = file.stat().st_size
    os.kill(address.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(STACKS_LOOK_S)
        size, last_size = file.stat().st_size, size
        if size == last_size > start_size:
            break
    with file.open("rb") as stream:
        stream.seek(start_size)
        return stream.read().decode(errors="replace")


def end_process(pid: int) -> None:
    """Kill a process of this node, even if it is stopped."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
