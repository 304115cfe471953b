"""Devices of sections: a GPU, or a CPU that only tries the code.

A section gets events, times and peaks from its device, so that the same lines run on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")

# Seconds of repeated calls per median, and the minimum and maximum number of calls.
SECONDS_PER_FIGURE = 0.3
REPEATS = (5, 50)
WARM_UP_CALLS = 2
# Larger than any L2 cache: written between two calls to evict their inputs.
FLUSHED_BYTES = 256 * 2**20


class HostEvent:
    """Event on the host's clock, with the methods of ``torch.cuda.Event``.

    On a CPU, work is done when its call returns.
    """

    def __init__(self) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return milliseconds from this event to another."""
        return 1e3 * (end._time - self._time)

    def synchronize(self) -> None:
        """Return immediately: no work is in flight."""

    def query(self) -> bool:
        """Return True: the event is in the past."""
        return True


@dataclass(frozen=True)
class Device:
    """Device of a section.

    Attributes:
        kind: ``"cuda"``, or ``"cpu"`` for a trial of the code with tiny sizes.
    """

    kind: str

    @property
    def is_gpu(self) -> bool:
        """Return True if figures are meaningful."""
        return self.kind == "cuda"

    @property
    def torch(self) -> torch.device:
        """Return the device of tensors."""
        return torch.device(self.kind)

    def choose(self, gpu: Value, cpu: Value) -> Value:
        """Return the size for the GPU, or a small one for a CPU."""
        return gpu if self.is_gpu else cpu

    def synchronize(self) -> None:
        """Wait until all issued work is done."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def event(self) -> Any:
        """Return an event that records its time."""
        return torch.cuda.Event(enable_timing=True) if self.is_gpu else HostEvent()

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Return the median milliseconds of several calls, with the L2 cache flushed before each.
        """
        for _ in range(self.choose(WARM_UP_CALLS, 0)):
            call()
        size = self.choose(FLUSHED_BYTES, 4096)
        flushed = torch.empty(size, dtype=torch.uint8, device=self.torch)
        times = self._timed(call, 1, flushed)
        if self.is_gpu:
            fitting = int(SECONDS_PER_FIGURE * 1e3 / max(times[0], 1e-3))
            times = self._timed(call, max(REPEATS[0], min(fitting, REPEATS[1])), flushed)
        return statistics.median(times)

    def _timed(self, call: Callable[[], Any], repeats: int, flushed: torch.Tensor) -> list[float]:
        pairs = []
        for _ in range(repeats):
            flushed.zero_()
            start, end = self.event(), self.event()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def busy(self, seconds: float) -> None:
        """Keep the current stream busy for about this long, without the host."""
        if self.is_gpu:
            torch.cuda._sleep(int(seconds * 1e9))  # cycles, at 1 to 2 GHz

    def used_bytes(self) -> int:
        """Return the used memory of the whole GPU, by all processes; 0 on a CPU."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def release(self) -> None:
        """Free cached memory before the next part measures its own."""
        if self.is_gpu:
            torch.cuda.empty_cache()


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error by norms; the absolute norm if the exact tensor is zero.

    NaN if any element is.
    """
    actual, exact = actual.detach().double(), exact.detach().double()
    norm = exact.norm()
    return ((actual - exact).norm() / (norm if norm > 1e-30 else 1.0)).item()
