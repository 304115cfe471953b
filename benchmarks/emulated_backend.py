"""An emulated GPU: a module's work sleeps for as long as a performance model says.

Sleeping needs no core, so the modules of several emulated GPUs (Ray actors, one each) run side
by side on a small machine, and plans of many GPUs can be run against their prediction.
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

# A sleep ends this late at most times; the rest is waited for awake.
AWAKE_SECONDS = 2e-4


class Seconds(Protocol):
    """A performance model of forwards, or of backwards."""

    def __call__(
        self, module: str, degree: int, quota: float, colocated: Mapping[str, float]
    ) -> float:
        """Seconds of one call.

        Args:
            module: that runs.
            degree: GPUs that it is replicated on.
            quota: its share of the GPU, as granted.
            neighbours: shares, as granted, of the modules that run beside it.
        """
        ...


def pause(seconds: float) -> None:
    """Take this much time and no core, but for the last moment."""
    deadline = time.perf_counter() + seconds
    if seconds > AWAKE_SECONDS:
        time.sleep(seconds - AWAKE_SECONDS)
    while time.perf_counter() < deadline:
        pass


_CURRENT = threading.local()


class EmulatedStream(AccountedStream):
    """A partition on which work takes the time that a performance model says."""

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
        """Hold the partition; :class:`EmulatedModule`'s work in this thread runs on it.

        Raises:
            InternalError: somebody holds some of its multiprocessors.
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
        """Of its module and of those beside it."""
        return {**self._colocated, self.partition.module: self.partition.share}

    def forward(self, degree: int) -> None:
        """Take the time of the module's forward on ``degree`` GPUs."""
        self._take(self._backend.forward_seconds, degree)

    def backward(self, degree: int) -> None:
        """Take the time of the module's backward on ``degree`` GPUs."""
        self._take(self._backend.backward_seconds, degree)

    def _take(self, seconds: Seconds, degree: int) -> None:
        one = self.partition
        self._backend.pause(seconds(one.module, degree, one.share, self._colocated))


class EmulatedBackend(RecordingBackend):
    """Streams whose work sleeps, and who ran when.

    Args:
        forward_seconds, backward_seconds: the performance model.
        gpu: what is pretended to be shared; by default an H100.
        clock: gives the account's time, in seconds.
        pause: lets so many seconds pass.
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
    """In a thread that holds a stream: shares of the GPU of its module and of those beside it; in
    others the device is whole: None."""
    stream = getattr(_CURRENT, "stream", None)
    return None if stream is None else stream.quotas


class _Sleeps(torch.autograd.Function):
    """``x + weight``, whose forward and backward sleep on the thread's current stream."""

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
    """A module that sleeps on the stream that is current where its forward and its backward
    are called. Computes ``x + weight``, with a single weight.

    Args:
        degree: GPUs that the module is replicated on.
    """

    def __init__(self, degree: int = 1) -> None:
        super().__init__()
        self.degree = degree
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape to the same shape. On the meta device, where shapes are tried, it takes no
        time.

        Raises:
            RuntimeError: no emulated stream is current in this thread; in the backward, also if
                it is another module's.
        """
        if x.is_meta:
            return x + self.weight
        return _Sleeps.apply(x, self.weight, self.degree)
