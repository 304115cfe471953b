"""Streams with SM quotas: their interface, and the pool of every partition that a plan uses, which
is created before the first step.

Creating a green context takes tens of milliseconds, and modules alternate many times in a step
(Mosaic §3.2). The plan determines the concurrent modules, so all streams are created at the start,
and a change of the plan's stage only selects another set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from raymm.actors.quota.partition import Multiprocessors, Partition, partition
from raymm.errors import PlanError


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


@dataclass(frozen=True)
class StreamSet:
    """Streams of the modules that run concurrently in one stage of the plan."""

    name: str
    streams: Mapping[str, QuotaStream]
    backend: Backend

    def join(self) -> None:
        """Run later work of the calling thread's current stream after all work of the set's
        streams. Does not wait on the host."""
        current = self.backend.current()
        for stream in self.streams.values():
            current.wait(stream.record())


class StreamPool:
    """Streams for the sets of quotas that a plan uses on one GPU.

    Partitions of one set are disjoint, partitions of different sets are not. :meth:`select`
    therefore starts a set after the previous set has finished.

    If several processes share a GPU, each creates a pool of the same sets in the same order and
    names its own modules. Partitions are laid out by position, so those of different processes are
    disjoint. The driver's split is assumed to be the same in every process; this is not documented,
    and ``benchmarks/gpu/green_contexts.py`` checks the SMs' numbers. *Disjoint does not mean
    concurrent:* work of different processes is time-sliced, with green contexts or without, unless
    the processes are clients of CUDA MPS, with ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` unset or 100.

    Args:
        backend: creates the streams; closed with the pool.
        modules: modules of this process, if other processes run the rest; all by default.

    Raises:
        PlanError: quotas that cannot be granted, or ``modules`` that are in no set. Nothing has
            been created then.
    """

    def __init__(
        self,
        backend: Backend,
        sets: Mapping[str, Mapping[str, float]],
        modules: Collection[str] | None = None,
    ) -> None:
        self.partitions: dict[str, tuple[Partition, ...]] = _layouts(backend, sets)
        accepted = {module for quotas in sets.values() for module in quotas}
        if isinstance(modules, str):  # a string would count as a collection of its letters
            raise PlanError(f"modules is {modules!r}; accepted: a collection of names, or None")
        requested = accepted if modules is None else set(modules)
        if not requested <= accepted:
            raise PlanError(
                f"modules are {sorted(requested)}; accepted: those of the sets, {sorted(accepted)}"
            )
        self._backend = backend
        self._sets: dict[str, StreamSet] = {}
        self._selected: StreamSet | None = None
        self._closed = False
        try:
            for name, layout in self.partitions.items():
                streams = {
                    share.module: backend.create(share, [p for p in layout if p is not share])
                    for share in layout
                    if share.module in requested
                }
                self._sets[name] = StreamSet(name, streams, backend)
        except BaseException:
            backend.close()
            raise

    def select(self, name: str) -> StreamSet:
        """Return the streams of a set. Their work runs after all work of the previously selected
        set, which may use the same multiprocessors. Creates nothing and does not wait on the host.
        Raise a ``PlanError`` if the set does not exist, and a ``RuntimeError`` if the pool is
        closed."""
        if self._closed:
            raise RuntimeError("the stream pool is closed")
        if name not in self._sets:
            raise PlanError(f"set is {name!r}; accepted: {', '.join(self._sets)}")
        previous, chosen = self._selected, self._sets[name]
        if previous is not None and previous is not chosen:
            events = [stream.record() for stream in previous.streams.values()]
            for stream in chosen.streams.values():
                for event in events:
                    stream.wait(event)
        if chosen.streams:  # empty if other processes run all modules of this set
            self._selected = chosen
        return chosen

    def report(self) -> str:
        """Return the requested and granted quotas, one line per module, and a line on work
        queues."""
        lines = [f"{name}: {share}" for name, layout in self.partitions.items() for share in layout]
        return "\n".join([*lines, *filter(None, [self._backend.queues])])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sets.clear()
            self._selected = None
            self._backend.close()

    def __enter__(self) -> StreamPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _layouts(
    backend: Backend, sets: Mapping[str, Mapping[str, float]]
) -> dict[str, tuple[Partition, ...]]:
    layouts = {}
    for name, quotas in sets.items():
        try:
            layouts[name] = partition(quotas, backend.gpu)
        except PlanError as error:
            raise PlanError(f"set {name!r}: {error}") from None
    return layouts
