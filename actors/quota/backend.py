"""What a backend of SM-quota streams has to offer. All of them look the same to their users.

``cuda`` (:mod:`.cuda_backend`) limits streams to multiprocessors through CUDA Green Contexts,
and ``recording`` (:mod:`.recording`) notes who ran when where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from raymm.actors.quota.partition import Multiprocessors, Partition


class Stream(Protocol):
    """A queue of device work. None of its methods waits on the host."""

    def record(self) -> Any:
        """An event: everything issued to the stream so far."""

    def wait(self, event: Any) -> None:
        """What is issued from now on runs after ``event``."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """The stream's work reads these: their memory is not reused before that is done."""


class QuotaStream(Stream, Protocol):
    """A stream whose work runs on one partition of the GPU."""

    partition: Partition

    def use(self) -> AbstractContextManager[None]:
        """Make it the calling thread's current stream."""
        ...


class Backend(Protocol):
    """Makes streams on partitions of one GPU, and ends them."""

    gpu: Multiprocessors
    queues: str
    """Whether partitions have work queues of their own, in words; empty if there are none."""

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> QuotaStream:
        """A new stream on a partition.

        Args:
            partition: of :attr:`gpu`.
            colocated: partitions that run at the same time.
        """
        ...

    def current(self) -> Stream:
        """The calling thread's current stream on the backend's device."""
        ...

    def close(self) -> None:
        """End all streams. Nothing may be issued to them any more, nothing that they computed
        may still be in use. Closing twice does nothing."""
