"""Peak memory of a process's stages and steps."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
# Resets the peak of resident memory to its current value (proc(5)).
_PEAK = b"5"


class PeakMemory:
    """Peak memory of a process from its creation on. On a GPU this is the memory that torch's
    allocator has assigned. On a CPU it is resident memory beyond the amount at creation, including
    cached memory; 0 if the system does not report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = self._clear = -1
        if device.type != "cuda":
            # Kept open: opening the files takes longer than reading them.
            self._status, self._clear = _opened(_STATUS, os.O_RDONLY), _opened(_CLEAR, os.O_WRONLY)
        self._before = self._resident(b"VmRSS:")

    def __del__(self) -> None:
        for file in (self._status, self._clear):
            if file >= 0:
                os.close(file)

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._clear >= 0:  # otherwise the peak covers the process's whole life
            with suppress(OSError):
                os.pwrite(self._clear, _PEAK, 0)

    def bytes(self) -> int:
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
