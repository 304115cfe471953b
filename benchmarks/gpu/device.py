"""Where sections run and how they measure there: a GPU, or a CPU that only tries the code.

A section asks its device for events, times and peaks, so that the same lines run on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")

# Seconds of repeated calls that a median is of, and how many there are at least and at most.
SECONDS_PER_FIGURE = 0.3
REPEATS = (5, 50)
WARM_UP_CALLS = 2
# More than any L2 cache: written between two calls, so that none finds its inputs there.
FLUSHED_BYTES = 256 * 2**20


class HostEvent:
    """A moment on the host's clock, with the methods of ``torch.cuda.Event``: on a CPU, work is
    done when its call returns."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Take down this moment."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this moment to another."""
        return 1e3 * (end._time - self._time)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """It has passed."""
        return True


@dataclass(frozen=True)
class Device:
    """Attributes:
        kind: ``"cuda"``, or ``"cpu"`` for a trial of the code with tiny sizes.
    """

    kind: str

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.kind == "cuda"

    @property
    def torch(self) -> torch.device:
        """The device of tensors."""
        return torch.device(self.kind)

    def choose(self, gpu: Value, cpu: Value) -> Value:
        """A size for the GPU, or one that a CPU tries in a moment."""
        return gpu if self.is_gpu else cpu

    def synchronize(self) -> None:
        """Wait until all that was issued is done."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def event(self) -> Any:
        """An event that knows when it passed."""
        return torch.cuda.Event(enable_timing=True) if self.is_gpu else HostEvent()

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Of one call: the median of several, the L2 cache overwritten before each."""
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
        """Memory of the whole GPU that is taken, by whomever; 0 on a CPU."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def release(self) -> None:
        """Give cached memory back, before the next part measures its own."""
        if self.is_gpu:
            torch.cuda.empty_cache()


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; where that is zero, the norm of
    what should be. NaN where anything is."""
    actual, exact = actual.detach().double(), exact.detach().double()
    norm = exact.norm()
    return ((actual - exact).norm() / (norm if norm > 1e-30 else 1.0)).item()
