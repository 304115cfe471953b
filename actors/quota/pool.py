"""The pool of SM-quota streams: every partition that a plan uses, made before the first step.

Creating a green context takes tens of milliseconds, and modules take turns many times in a step
(Mosaic §3.2). What runs beside what is known from the plan, so all streams are made at the
start; going from one stage of the plan to the next only picks another set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from raymm.actors.quota.backend import Backend, QuotaStream
from raymm.actors.quota.partition import Partition, partition
from raymm.errors import PlanError


@dataclass(frozen=True)
class StreamSet:
    """The streams of the modules that run concurrently in one stage of the plan.

    Attributes:
        name: of the set.
        streams: by module, in the order of the plan.
        backend: of all of them.
    """

    name: str
    streams: Mapping[str, QuotaStream]
    backend: Backend

    def join(self) -> None:
        """Order what the calling thread issues from now on, on its current stream, after all
        that the set's streams were given. Does not wait on the host."""
        current = self.backend.current()
        for stream in self.streams.values():
            current.wait(stream.record())


class StreamPool:
    """Streams for the sets of quotas that a plan uses on one GPU.

    Within a set partitions are disjoint; partitions of different sets are not, so
    :meth:`select` lets a set begin when the one before it has ended.

    Several processes that share a GPU each make a pool of the same sets in the same order, and
    name their own modules: partitions are laid out by position, so theirs are disjoint. The
    driver's split is taken to be the same in every process (it is not documented to be;
    ``benchmarks/gpu/green_contexts.py`` looks at the SMs' numbers). *Disjoint is not yet
    concurrent:* work of different processes is time-sliced, green contexts or not, unless the
    processes are clients of CUDA MPS, with ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` unset or 100.

    Args:
        backend: makes the streams; closed with the pool.
        sets: quotas by module, by name of the set.
        modules: whose streams to make, where other processes run the rest; all by default.

    Raises:
        PlanError: quotas that cannot be granted, or ``modules`` that are in no set. Nothing
            has been created then.
    """

    def __init__(
        self,
        backend: Backend,
        sets: Mapping[str, Mapping[str, float]],
        modules: Collection[str] | None = None,
    ) -> None:
        self.partitions: dict[str, tuple[Partition, ...]] = _layouts(backend, sets)
        accepted = {module for quotas in sets.values() for module in quotas}
        if isinstance(modules, str):  # its letters would be the names
            raise PlanError(f"modules is {modules!r}; accepted: a collection of names, or None")
        mine = accepted if modules is None else set(modules)
        if not mine <= accepted:
            raise PlanError(
                f"modules are {sorted(mine)}; accepted: those of the sets, {sorted(accepted)}"
            )
        self._backend = backend
        self._sets: dict[str, StreamSet] = {}
        self._selected: StreamSet | None = None
        self._closed = False
        try:
            for name, layout in self.partitions.items():
                streams = {
                    part.module: backend.create(part, [p for p in layout if p is not part])
                    for part in layout
                    if part.module in mine
                }
                self._sets[name] = StreamSet(name, streams, backend)
        except BaseException:
            backend.close()
            raise

    def select(self, name: str) -> StreamSet:
        """The streams of a set, ordered after all that the set selected before was given: the
        two may use the same multiprocessors. Nothing is created, and the host does not wait.

        Raises:
            PlanError: no such set.
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the stream pool is closed")
        if name not in self._sets:
            raise PlanError(f"set is {name!r}; accepted: {', '.join(self._sets)}")
        before, chosen = self._selected, self._sets[name]
        if before is not None and before is not chosen:
            events = [stream.record() for stream in before.streams.values()]
            for stream in chosen.streams.values():
                for event in events:
                    stream.wait(event)
        if chosen.streams:  # none: other processes run all modules of this set
            self._selected = chosen
        return chosen

    def report(self) -> str:
        """What was asked and granted, a line per module of every set; and one of work queues."""
        lines = [f"{name}: {part}" for name, layout in self.partitions.items() for part in layout]
        return "\n".join([*lines, *filter(None, [self._backend.queues])])

    def close(self) -> None:
        """End all streams; see :meth:`Backend.close`. Closing twice does nothing."""
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
