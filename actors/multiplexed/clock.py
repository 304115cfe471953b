"""When the nodes of an iteration ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.multiplex.instructions import Run


class TimedRun(NamedTuple):
    """When a node ran; seconds of the host's wall clock."""

    direction: Direction
    node: str
    slot: int
    start: float
    end: float


class RunClock:
    """Times runs by the host's clock on a CPU, by events of their streams on a GPU. Threads may
    share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._intervals: list[tuple[Run, str, Any, Any]] = []
        self._origin = self._mark()
        self._at = time.time()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def timing(self, run: Run, node: str) -> Iterator[None]:
        """Times what is inside."""
        start = self._mark()
        yield
        self._intervals.append((run, node, start, self._mark()))

    def runs(self) -> list[TimedRun]:
        """All that did not raise; on a GPU, waits until they are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            TimedRun(run.direction, node, run.slot, self._seconds(a), self._seconds(b))
            for run, node, a, b in self._intervals
        ]

    def _seconds(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return mark
        return self._at + self._origin.elapsed_time(mark) / 1e3
