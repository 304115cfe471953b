"""A process as seen from outside: its state, its stacks, and the files of NCCL's flight recorder.

The stacks are available even if the process holds the interpreter's lock or waits in C code: on a
signal, C code writes them to an unnamed file, which is reached through the process's descriptor.
NCCL's flight recorder writes the last NCCL operations of a process that fails to a file, for
torch's ``torch.distributed.flight_recorder.fr_trace``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Number of recorded operations, a few hundred bytes each: enough for the last steps.
OPERATIONS = 2000
# Variables that torch reads, with their value and the older variable that takes precedence.
_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": (str(OPERATIONS), "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", ""),
    "TORCH_FR_DUMP_TEMP_FILE": ("", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
}


def record_flight() -> None:
    """Enable the flight recorder in this process, with files where :func:`records` finds them.
    Variables that are set are kept. Call this before the first GPU operation."""
    for name, (value, older) in _SETTINGS.items():
        if older not in os.environ:
            os.environ.setdefault(name, value or str(_base(os.getpid())))


def records(pid: int) -> tuple[str, ...]:
    """Return the flight recorder files of a process on this node; torch appends the process's
    rank."""
    base = _base(pid)
    return tuple(sorted(map(str, base.parent.glob(f"{base.name}*"))))


def _base(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"raymm-nccl-{pid}-rank-"


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


def records_text(names: Sequence[str], looks: Mapping[int, Look]) -> str:
    """Return one line per rank that names its flight recorder files; empty without files."""
    return "".join(
        f"\nNCCL's flight recorder (torch.distributed.flight_recorder.fr_trace) of {names[rank]}: "
        f"{', '.join(look.records)}"
        for rank, look in sorted(looks.items()) if look.records
    )
