"""Fakes of torch's streams and events on a fake driver, which record the order of work.

A kernel is recorded with its stream's multiprocessors and all kernels that precede it: those of its
stream, and those that the stream has waited for. So the fakes detect whether two could run at the
same time. Streams and events must follow the rules of the CUDA API, also after their destruction.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tests.support.fake_driver import FakeDriver


class CudaMisuseError(AssertionError):
    """Error for a call that the CUDA API rejects, or whose effect is undefined."""


class Kernel(NamedTuple):
    """Work on a stream.

    Attributes:
        number: in launch order.
        name: given by the caller.
        sms: multiprocessors that it may run on.
        after: numbers of kernels that have ended before it starts.
    """

    number: int
    name: str
    sms: frozenset[int]
    after: frozenset[int]


class Stream:
    """Torch stream: ordinary (in the primary context), or in a green context."""

    def __init__(self, cuda: FakeCuda, address: int | None) -> None:
        self.address = address
        self.cuda = cuda
        self.done: frozenset[int] = frozenset()  # issued work, and work that it has waited for

    def check(self) -> None:
        driver = self.cuda.driver
        if self.address is not None and self.address not in driver.streams:
            raise CudaMisuseError("the stream was destroyed")
        if self.address is not None and driver.streams[self.address] not in driver.contexts:
            raise CudaMisuseError("the stream is detached: its context was destroyed")

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.check()
        if event.done is None:
            raise CudaMisuseError("an event that was never recorded orders nothing")
        self.done |= event.done


class Event:
    """Event of the device's primary context, whichever stream records it."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self.cuda, self.enable_timing = cuda, enable_timing
        self.done: frozenset[int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        stream.check()
        self.done = stream.done


class FakeCuda:
    """The part of ``torch.cuda`` that quotas use. :meth:`installed` replaces torch's."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.kernels: list[Kernel] = []
        self.log: list[str] = []
        self._lock = threading.Lock()
        self._current = threading.local()
        self._default = Stream(self, None)
        driver.pending = self.pending
        self._synchronized = 0

    def launch(self, name: str) -> Kernel:
        """Launch a kernel on the calling thread's current stream."""
        stream = self.current_stream()
        stream.check()
        with self._lock:
            address = stream.address
            whole = frozenset(range(self.driver.total))
            sms = whole if address is None else self.driver.sms_of(address)
            kernel = Kernel(len(self.kernels), name, sms, stream.done)
            self.kernels.append(kernel)
            stream.done |= {kernel.number}
        return kernel

    def pending(self) -> int:
        """Return the number of kernels that have not ended for the host."""
        return len(self.kernels) - self._synchronized

    def unordered(self) -> list[tuple[str, str]]:
        """Return pairs of kernels that could run concurrently on the same multiprocessors."""
        return [
            (first.name, second.name) for first, second in combinations(self.kernels, 2)
            if first.sms & second.sms and first.number not in second.after
        ]

    # torch's interface

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._current, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        stream.check()
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device: object = None) -> None:
        self.log.append("synchronize")
        self._synchronized = len(self.kernels)

    def empty_cache(self) -> None:
        self.log.append(f"empty_cache with {len(self.driver.streams)} streams")

    @contextlib.contextmanager
    def installed(self, patch: object) -> Iterator[None]:
        """Install the fake, so that :class:`raymm.actors.quota.CudaBackend` can be created.

        Args:
            patch: pytest's ``monkeypatch``.
        """
        empty = torch.empty

        def allocate(*sizes: int, device: object = None, **options: object) -> torch.Tensor:
            self.driver.primary_active = self.driver.primary_active or device is not None
            return empty(*sizes, **options)

        with patch.context() as inner:
            inner.setattr(torch, "empty", allocate)
            inner.setattr(
                torch._C, "_cuda_clearCublasWorkspaces",
                lambda: self.log.append("workspaces"), raising=False,
            )  # fmt: skip
            for name, stand_in in {
                "is_available": lambda: True,
                "current_device": lambda: 0,
                "get_device_capability": lambda device=None: (9, 0),
                "synchronize": self.synchronize,
                "empty_cache": self.empty_cache,
                "current_stream": self.current_stream,
                "stream": self.stream,
                "Stream": lambda device: Stream(self, None),
                "ExternalStream": lambda address, device: Stream(self, address),
                "Event": lambda **options: Event(self, **options),
            }.items():
                inner.setattr(torch.cuda, name, stand_in)
            bindings = SimpleNamespace(driver=self.driver)
            import sys

            inner.setitem(sys.modules, "cuda.bindings", bindings)
            inner.setitem(sys.modules, "cuda.bindings.driver", self.driver)
            yield
