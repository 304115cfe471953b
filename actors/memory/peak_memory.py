"""The most memory that a process's stages and steps take."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
# Sets the peak of resident memory back to what is resident now (proc(5)).
_PEAK = b"5"


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
        self._status = self._clear = -1
        if device.type != "cuda":
            # Left open: to look for the files by name takes longer than to read them.
            self._status, self._clear = _opened(_STATUS, os.O_RDONLY), _opened(_CLEAR, os.O_WRONLY)
        self._before = self._resident(b"VmRSS:")

    def __del__(self) -> None:
        for file in (self._status, self._clear):
            if file >= 0:
                os.close(file)

    def restart(self) -> None:
        """The peak starts from what is held now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._clear >= 0:  # else it is the peak of the process's life
            with suppress(OSError):
                os.pwrite(self._clear, _PEAK, 0)

    def bytes(self) -> int:
        """The peak."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, self._resident(b"VmHWM:") - self._before)

    def _resident(self, name: bytes) -> int:
        if self._status < 0:
            return 0
        _, _, value = os.pread(self._status, 8192, 0).partition(name)
        return int(value.split(None, 1)[0]) * 1024 if value else 0


def _opened(path: str, flags: int) -> int:
    with suppress(OSError):
        return os.open(path, flags | os.O_CLOEXEC)
    return -1
