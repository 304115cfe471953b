"""SM-quota streams without a GPU: nothing is limited, but who ran when is written down.

Work that would run on multiprocessors which another module holds at that moment is refused, so
that a plan that oversubscribes its GPU shows on a laptop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from raymm.actors.quota.partition import Multiprocessors, Partition
from raymm.errors import InternalError


class QuotaSpan(NamedTuple):
    """One use of a partition; ``start`` and ``end`` in seconds of the account's clock."""

    partition: Partition
    start: float
    end: float


class Account:
    """Who holds which multiprocessors of one GPU, now and before. Threads may share it.

    Args:
        clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: list[Partition] = []
        self._spans: list[QuotaSpan] = []

    @contextmanager
    def running(self, partition: Partition) -> Iterator[None]:
        """Hold a partition.

        Raises:
            InternalError: somebody holds some of its multiprocessors.
        """
        with self._lock:
            for other in self._running:
                if partition.overlaps(other):
                    raise InternalError(
                        f"{partition} starts while these multiprocessors are in use by {other}"
                    )
            self._running.append(partition)
            start = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(partition)
                self._spans.append(QuotaSpan(partition, start, self._clock()))

    @property
    def spans(self) -> tuple[QuotaSpan, ...]:
        """All uses that have ended, in the order of their ends."""
        with self._lock:
            return tuple(self._spans)


class HostStream:
    """A stream of work that is done by the time its call returns: there is nothing to order."""

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass


class AccountedStream(HostStream):
    """A partition whose uses go to an account."""

    def __init__(self, partition: Partition, account: Account) -> None:
        self.partition = partition
        self._account = account

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the partition.

        Raises:
            InternalError: somebody holds some of its multiprocessors.
        """
        with self._account.running(self.partition):
            yield


class RecordingBackend:
    """Streams that only keep books, in :attr:`account`.

    Args:
        gpu: what is pretended to be shared; by default an H100.
        clock: gives the account's time, in seconds.
    """

    def __init__(
        self,
        gpu: Multiprocessors | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.gpu = gpu or Multiprocessors()
        self.queues = ""
        self.account = Account(clock)

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> AccountedStream:
        return AccountedStream(partition, self.account)

    def current(self) -> HostStream:
        return HostStream()

    def close(self) -> None:
        pass
