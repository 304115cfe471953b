"""SM-quota streams without a GPU: nothing is limited, but usage is recorded.

Work on multiprocessors that another module holds at that moment is rejected, so that a plan that
oversubscribes its GPU is detected on a laptop.
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
    """Use of a partition; ``start`` and ``end`` in seconds of the account's clock."""

    partition: Partition
    start: float
    end: float


class Account:
    """Record of the partitions of one GPU that are and were in use. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: list[Partition] = []
        self._spans: list[QuotaSpan] = []

    @contextmanager
    def running(self, partition: Partition) -> Iterator[None]:
        """Hold a partition for the length of the block. Raise an ``InternalError`` if another
        module holds some of its multiprocessors."""
        with self._lock:
            for active in self._running:
                if partition.overlaps(active):
                    raise InternalError(
                        f"{partition} starts while these multiprocessors are in use by {active}"
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
        """Return all finished uses, in the order of their ends."""
        with self._lock:
            return tuple(self._spans)


class HostStream:
    """Stream on the host, whose work is done when a call returns, so there is nothing to order."""

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass


class AccountedStream(HostStream):
    """Stream on a partition whose use is recorded in an account."""

    def __init__(self, partition: Partition, account: Account) -> None:
        self.partition = partition
        self._account = account

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the partition for the length of the block; see :meth:`Account.running`."""
        with self._account.running(self.partition):
            yield


class RecordingBackend:
    """Backend whose streams record their use in :attr:`account`; ``gpu`` is an H100 by default."""

    def __init__(
        self, gpu: Multiprocessors | None = None, clock: Callable[[], float] = time.perf_counter
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
