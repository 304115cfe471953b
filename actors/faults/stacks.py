"""Stacks of a process, also of one that holds the interpreter's lock or waits in C code: a signal
has them written by C code, into a file that only the process's descriptor leads to."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from raymm.actors.faults.flight_recorder import records

# What a process of raymm answers with its stacks.
STACKS_SIGNAL = signal.SIGUSR2
# Seconds for them to come, and between two looks whether they are there. A process that is stopped
# is not asked; an error waits for those of the others.
STACKS_TIMEOUT_S, STACKS_LOOK_S = 1.0, 0.05
# Bytes at the end of a log that are searched for the reason of the process's end.
LOG_TAIL_BYTES = 64 * 1024

_STATES = {
    "R": "computing", "S": "sleeping", "D": "waiting for a disk", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead", "X": "dead",
}  # fmt: skip


class Address(NamedTuple):
    """Where the stacks of a process are had.

    Attributes:
        node: Ray's id of the node.
        pid: of the process.
        descriptor: its descriptor of the file.
        errors: path of the log on that node that its standard error goes to; empty if unknown.
    """

    node: str
    pid: int
    descriptor: int
    errors: str = ""


class Look(NamedTuple):
    """A process from outside: what the system says of it, the stacks of its threads, files of
    NCCL's flight recorder, and True in ``aborted`` if SIGABRT has ended the process."""

    state: str
    stacks: str
    records: tuple[str, ...] = ()
    aborted: bool = False


class StackFile:
    """Has this process answer :data:`STACKS_SIGNAL`, for as long as it lives."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()


def look_at(address: Address) -> Look:
    """A process of this node, from outside. Never raises: what cannot be had is said."""
    try:
        letter = Path(f"/proc/{address.pid}/stat").read_text().rpartition(")")[2].split()[0]
        state = _STATES.get(letter, letter)
        stacks = "" if letter in "TtZX" else _stacks(address)
    except OSError as error:
        gone = not Path(f"/proc/{address.pid}").exists() and Path("/proc").is_dir()
        state, stacks = "dead" if gone else f"unknown ({error})", ""
    return Look(state, stacks, records(address.pid), _aborted(address.errors))


def error_log() -> str:
    """Return the path of the file that this process's standard error goes to; empty if unknown."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""


def _aborted(errors: str) -> bool:
    """Return whether a log ends with what Python's fault handler writes on SIGABRT, which Ray
    enables in its workers."""
    try:
        with Path(errors).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return b"Fatal Python error: Aborted" in stream.read()
    except OSError:  # unknown, or a pipe
        return False


def _stacks(address: Address) -> str:
    file = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
    before = size = file.stat().st_size
    os.kill(address.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(STACKS_LOOK_S)
        size, last_size = file.stat().st_size, size
        if size == last_size > before:
            break
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read().decode(errors="replace")


def end_process(pid: int) -> None:
    """Kill a process of this node; also one that is stopped, and so does not obey Ray."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
