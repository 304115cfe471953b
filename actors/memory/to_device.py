"""Transfer of stage inputs to the device that runs the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, overload

import torch

from raymm.kernels import host_copies

Row = dict[str, Any] | None
"""Inputs of a stage for a microbatch, by name; None if the microbatch has none for it."""
Stage = TypeVar("Stage")

# Copies inputs into pinned memory while the step's thread issues work.
PINNING: Executor = ThreadPoolExecutor(1, "pin-inputs")


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it, also in nested dicts, copied by
    :func:`raymm.kernels.host_copies.to_device`."""
    if isinstance(value, torch.Tensor):
        return host_copies.to_device(value, device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value


def step_inputs(
    rows: Mapping[Stage, Sequence[Row]], device: torch.device
) -> dict[Stage, Sequence[Row]]:
    """Return a step's inputs, by stage and microbatch, on a device. On a GPU a thread pins them,
    and they are copied per microbatch, see :class:`CopiedRows`."""
    if device.type != "cuda":
        return {
            stage: [to_device(row, device) for row in stage_rows]
            for stage, stage_rows in rows.items()
        }
    stream = _copy_stream(device)
    # Work issued to the device before may still read memory that this stream reuses.
    stream.wait_stream(torch.cuda.current_stream(device))
    pinned: dict[Stage, list[Future[Any]]] = {stage: [] for stage in rows}
    for microbatch in range(max(map(len, rows.values()), default=0)):  # in the order of use
        for stage, stage_rows in rows.items():
            if microbatch < len(stage_rows):
                pinned[stage].append(PINNING.submit(_pinned, stage_rows[microbatch]))
    return {
        stage: CopiedRows(rows[stage], stage_rows, stream) for stage, stage_rows in pinned.items()
    }


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream in all steps, because the allocator reserves memory per stream."""
    return torch.cuda.Stream(device)


class CopiedRows(Sequence[Row]):
    """Inputs of a stage, each copied to a GPU when its microbatch or the one before is first used.
    Copies are issued to a separate stream; the current stream at the first use waits for them.
    Tensors must live until the device has finished the step."""

    def __init__(
        self, rows: Sequence[Row], pinned: Sequence[Future[Any]], stream: torch.cuda.Stream
    ) -> None:
        self._rows, self._pinned, self._stream = rows, pinned, stream
        self._copies: dict[int, tuple[Row, Any]] = {}
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row, event = self._copied(index)
        if index not in self._used:
            self._used.add(index)
            torch.cuda.current_stream(self._stream.device).wait_event(event)
        if index + 1 < len(self) and self._pinned[index + 1].done():
            self._copied(index + 1)
        return row

    def _copied(self, index: int) -> tuple[Row, Any]:
        if index not in self._copies:
            pinned = self._pinned[index].result()
            with torch.cuda.stream(self._stream):
                row = _copied(self._rows[index], pinned, self._stream.device)
                self._copies[index] = row, self._stream.record_event()
        return self._copies[index]


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu"
        return value.pin_memory() if on_host and not value.is_pinned() else value
    if isinstance(value, dict):
        return {key: _pinned(item) for key, item in value.items()}
    return value


def _copied(value: Any, pinned: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        copy = host_copies.to_device(pinned, device)
        if pinned is not value:  # remember the original tensor, not its pinned copy
            host_copies.remember(copy, value)
        return copy
    if isinstance(value, dict):
        return {key: _copied(item, pinned[key], device) for key, item in value.items()}
    return value
