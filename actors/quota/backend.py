"""Interface of backends for SM-quota streams.

``cuda`` (:mod:`.cuda_backend`) limits streams to multiprocessors through CUDA Green Contexts.
``recording`` (:mod:`.recording`) records usage where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from raymm.actors.quota.partition import Multiprocessors, Partition


class Stream(Protocol):
    """Queue of device work. No method waits on the host."""

    def record(self) -> Any:
        """Return an event that marks everything issued to the stream so far."""

    def wait(self, event: Any) -> None:
        """Run work that is issued from now on after ``event``."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors that the stream's work reads from being reused before that
        work is done."""


class QuotaStream(Stream, Protocol):
    """Stream whose work runs on one partition of the GPU."""

    partition: Partition

    def use(self) -> AbstractContextManager[None]:
        """Make the stream the calling thread's current stream."""
        ...


class Backend(Protocol):
    """Factory of streams on partitions of one GPU."""

    gpu: Multiprocessors
    queues: str
    """Text that says if partitions have separate work queues; empty if there are no queues."""

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> QuotaStream:
        """Create a stream on a partition; ``colocated`` partitions run at the same time."""
        ...

    def current(self) -> Stream:
        """Return the calling thread's current stream on the backend's device."""
        ...

    def close(self) -> None:
        """Destroy all streams, whose results must not be in use any more. Closing twice does
        nothing."""
