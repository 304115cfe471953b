"""Emulated GPU: a module's work sleeps for the time that a performance model predicts.

A sleeping process needs no core, so the modules of several emulated GPUs (Ray actors, one each) run
concurrently on a small machine, and plans for many GPUs can be compared with their prediction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from raymm.actors.quota.partition import Multiprocessors, Partition
from raymm.actors.quota.recording import Account, AccountedStream, RecordingBackend

# Sleeps end at most this late; the remaining time is spent in a busy loop.
AWAKE_SECONDS = 2e-4


class Seconds(Protocol):
    """Performance model of forwards, or of backwards."""

    def __call__(
        self, module: str, degree: int, quota: float, colocated: Mapping[str, float]
    ) -> float:
        """Return the seconds of one call.

        Args:
            degree: number of GPUs that it is replicated on.
            colocated: granted shares of the modules that run concurrently.
        """
        ...


def pause(seconds: float) -> None:
    """Wait without using a core, except for the last moment."""
    deadline = time.perf_counter() + seconds
    if seconds > AWAKE_SECONDS:
        time.sleep(seconds - AWAKE_SECONDS)
    while time.perf_counter() < deadline:
        pass


_CURRENT = threading.local()


class EmulatedStream(AccountedStream):
    """Partition on which work takes the time that a performance model predicts."""

    def __init__(
        self,
        partition: Partition,
        colocated: Sequence[Partition],
        account: Account,
        backend: EmulatedBackend,
    ) -> None:
        super().__init__(partition, account)
        self._colocated = {one.module: one.share for one in colocated}
        self._backend = backend

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the partition; the work of :class:`EmulatedModule` in this thread runs on it.

        Raises:
            InternalError: some of its multiprocessors are already held.
        """
        before = getattr(_CURRENT, "stream", None)
        with super().use():
            _CURRENT.stream = self
            try:
                yield
            finally:
                _CURRENT.stream = before

    @property
    def quotas(self) -> dict[str, float]:
        """Return the quotas of its module and of the modules that run concurrently."""
        return {**self._colocated, self.partition.module: self.partition.share}

    def forward(self, degree: int) -> None:
        """Sleep for the module's forward on ``degree`` GPUs."""
        self._take(self._backend.forward_seconds, degree)

    def backward(self, degree: int) -> None:
        """Sleep for the module's backward on ``degree`` GPUs."""
        self._take(self._backend.backward_seconds, degree)

    def _take(self, seconds: Seconds, degree: int) -> None:
        one = self.partition
        self._backend.pause(seconds(one.module, degree, one.share, self._colocated))


class EmulatedBackend(RecordingBackend):
    """Backend whose streams sleep and record their use.

    Args:
        gpu: emulated GPU; by default an H100.
        clock: returns the time of the record, in seconds.
    """

    def __init__(
        self,
        forward_seconds: Seconds,
        backward_seconds: Seconds,
        gpu: Multiprocessors | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = pause,
    ) -> None:
        super().__init__(gpu, clock)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.pause = pause

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> EmulatedStream:
        return EmulatedStream(partition, colocated, self.account, self)


def quotas_here() -> dict[str, float] | None:
    """Return GPU shares of this thread's module and its concurrent ones; None without a stream."""
    stream = getattr(_CURRENT, "stream", None)
    return None if stream is None else stream.quotas


class _Sleeps(torch.autograd.Function):
    """Autograd function ``x + weight`` that sleeps on the thread's current stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, degree: int) -> torch.Tensor:
        stream = _current_stream()
        ctx.degree, ctx.module = degree, stream.partition.module
        stream.forward(degree)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        stream = _current_stream()
        if stream.partition.module != ctx.module:
            raise RuntimeError(
                f"the backward of {ctx.module!r} runs on the stream of "
                f"{stream.partition.module!r}; accepted: outputs that are detached before another "
                "module consumes them"
            )
        stream.backward(ctx.degree)
        return grad, grad.sum(), None


def _current_stream() -> EmulatedStream:
    stream = getattr(_CURRENT, "stream", None)
    if stream is None:
        raise RuntimeError("an emulated module ran without a stream: use EmulatedStream.use()")
    return stream


class EmulatedModule(nn.Module):
    """Module ``x + weight`` with a single weight that sleeps on the current stream.

    Forward and backward each use the stream that is current in the thread that calls them.

    Args:
        degree: number of GPUs that the module is replicated on.
    """

    def __init__(self, degree: int = 1) -> None:
        super().__init__()
        self.degree = degree
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape; on the meta device without sleeping.

        Raises:
            RuntimeError: no emulated stream is current in this thread; in the backward, also if the
                stream belongs to another module.
        """
        if x.is_meta:
            return x + self.weight
        return _Sleeps.apply(x, self.weight, self.degree)
