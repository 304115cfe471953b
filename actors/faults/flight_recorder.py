"""NCCL's flight recorder: a process that fails writes its last NCCL operations to a file, for
torch's ``torch.distributed.flight_recorder.fr_trace``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

# Number of recorded operations, a few hundred bytes each: enough for the last steps.
OPERATIONS = 2000
# Variables that torch reads, with their value and the older variable that takes precedence.
_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": (str(OPERATIONS), "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", ""),
    "TORCH_FR_DUMP_TEMP_FILE": ("", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
}


class Recorded(Protocol):
    """Object with the paths of a process's flight records."""

    @property
    def records(self) -> tuple[str, ...]: ...


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


def records_text(names: Sequence[str], looks: Mapping[int, Recorded]) -> str:
    """Return one line per rank that names its flight recorder files; empty without files."""
    return "".join(
        f"\nNCCL's flight recorder (torch.distributed.flight_recorder.fr_trace) of {names[rank]}: "
        f"{', '.join(look.records)}"
        for rank, look in sorted(looks.items()) if look.records
    )
