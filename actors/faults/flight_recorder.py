"""NCCL's flight recorder: its last operations, which a process writes into a file when the watchdog
or another process's failure ends it, for torch's ``torch.distributed.flight_recorder.fr_trace``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

# Operations that are remembered, a few hundred bytes each: those of the last steps.
OPERATIONS = 2000
# A setting that torch reads, and the older names that go before it where they are set.
_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": (str(OPERATIONS), "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", ""),
    "TORCH_FR_DUMP_TEMP_FILE": ("", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
}


class Recorded(Protocol):
    """What is known of a process from outside."""

    @property
    def records(self) -> tuple[str, ...]: ...


def record_flight() -> None:
    """Have NCCL in this process remember its operations, and write them where :func:`records`
    finds them; where nobody has set that otherwise. Before anything is on a GPU."""
    for name, (value, older) in _SETTINGS.items():
        if older not in os.environ:
            os.environ.setdefault(name, value or str(_base(os.getpid())))


def records(pid: int) -> tuple[str, ...]:
    """Files that a process of this node has written; torch adds the process's number."""
    base = _base(pid)
    return tuple(sorted(map(str, base.parent.glob(f"{base.name}*"))))


def _base(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"raymm-nccl-{pid}-rank-"


def records_text(names: Sequence[str], looks: Mapping[int, Recorded]) -> str:
    """Where the records are, a line for each rank; empty if there are none.

    Args:
        names: of the ranks.
        looks: at the ranks, from outside.
    """
    return "".join(
        f"\nNCCL's flight recorder (torch.distributed.flight_recorder.fr_trace) of {names[rank]}: "
        f"{', '.join(look.records)}"
        for rank, look in sorted(looks.items()) if look.records
    )
