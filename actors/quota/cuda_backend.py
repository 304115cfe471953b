"""SM-quota streams on a CUDA device: torch streams in green contexts.

Only multiprocessors are limited. Memory, memory bandwidth and the L2 cache are shared, and before
CUDA 13.1 also the hardware work queues, so work on disjoint multiprocessors *may* overlap. With
``CUDA_DEVICE_MAX_CONNECTIONS=1`` or ``CUDA_LAUNCH_BLOCKING=1`` it cannot overlap, so these settings
are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from raymm.actors.quota.green_context import GreenContexts
from raymm.actors.quota.partition import Partition
from raymm.errors import InputError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLOCKING = "CUDA_LAUNCH_BLOCKING"


class CudaStream:
    """Torch stream with the interface of :class:`raymm.actors.quota.backend.Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch_stream = stream

    def record(self) -> torch.cuda.Event:
        return cast(torch.cuda.Event, self.torch_stream.record_event())

    def wait(self, event: torch.cuda.Event) -> None:
        self.torch_stream.wait_event(event)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.torch_stream)


class CudaQuotaStream(CudaStream):
    """Torch stream whose kernels run on a partition's multiprocessors: an ``ExternalStream`` in a
    green context, or an ordinary stream if the partition is the whole GPU."""

    def __init__(self, partition: Partition, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.partition = partition

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.cuda.stream(self.torch_stream):
            yield


class CudaBackend:
    """Green contexts of one GPU; ``coscheduled`` as in
    :class:`raymm.actors.quota.green_context.GreenContexts`.

    Raises:
        InputError: no CUDA device, no cuda-python, a driver before 12.4, or environment variables
            that prevent streams from overlapping.
    """

    def __init__(self, device: torch.device | int | None = None, coscheduled: bool = True) -> None:
        _check_environment()
        try:
            # The module is found by an import hook, which type checkers do not run.
            from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise InputError(f"cuda-python cannot be imported: {error}") from error
        self.device = torch.device("cuda", _ordinal(device))
        # The first allocation activates the primary context, which green contexts depend on.
        torch.empty(1, device=self.device)
        self._contexts = GreenContexts(
            driver, self.device.index, torch.cuda.get_device_capability(self.device)[0], coscheduled
        )
        self.gpu, self.queues = self._contexts.gpu, self._contexts.queues
        self._streams: dict[tuple[str, int, int, bool], torch.cuda.Stream] = {}

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> CudaQuotaStream:
        """Return a stream on a partition. Partitions of a module with the same groups in different
        sets share one: cuBLAS keeps a workspace (32 MiB on an H100) per stream, and backward uses
        its forward's stream."""
        key = (partition.module, partition.first_group, partition.groups, partition.whole)
        if key not in self._streams:
            self._streams[key] = self._new_stream(partition)
        return CudaQuotaStream(partition, self._streams[key])

    def _new_stream(self, partition: Partition) -> torch.cuda.Stream:
        if partition.whole:
            return torch.cuda.Stream(self.device)
        address = self._contexts.stream(partition)
        return torch.cuda.ExternalStream(address, device=self.device)

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for the device, free the streams' cached memory, and destroy them. When a tensor is
        freed, the allocator records an event on every stream that has read it. Tensors and autograd
        graphs of these streams must therefore be freed before."""
        torch.cuda.synchronize(self.device)
        self._streams.clear()
        # Not public in torch 2.13; without this call the workspaces of destroyed streams stay
        # allocated.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
        self._contexts.close()


def _ordinal(device: torch.device | int | None) -> int:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    return torch.cuda.current_device() if device.index is None else device.index


def _check_environment() -> None:
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device; use RecordingBackend instead")
    if os.environ.get(CONNECTIONS) == "1":
        raise InputError(
            f"{CONNECTIONS} is '1': the GPU would serialize different streams; accepted: "
            "unset, or at least the number of streams that run at the same time"
        )
    if os.environ.get(BLOCKING, "0") not in ("", "0"):
        raise InputError(
            f"{BLOCKING} is {os.environ[BLOCKING]!r}: every launch would wait for its kernel, "
            "which serializes different streams; accepted: unset or 0"
        )
