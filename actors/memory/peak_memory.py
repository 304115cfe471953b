"""The most memory that a process's stages and steps take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Sets the peak of resident memory back to what is resident now (proc(5)).
_PEAK = "5"


class PeakMemory:
    """Watches a process from here on.

    On a GPU it is what torch's allocator handed out; on a CPU resident memory, beyond what was
    resident at the beginning: with everything that allocators keep for later, and 0 where the
    system does not say.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _resident("VmRSS")

    def restart(self) -> None:
        """The peak starts from what is held now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # then it is the peak of the process's life
            _CLEAR.write_text(_PEAK)

    def bytes(self) -> int:
        """The peak."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _resident("VmHWM") - self._before)


def _resident(name: str) -> int:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
