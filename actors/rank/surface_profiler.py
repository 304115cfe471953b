"""Actor that measures scaling surfaces: whole modules on quotas, alone and concurrently.

Quotas and colocation need a GPU with green contexts (:mod:`raymm.actors.quota`); this part has not
run on such a GPU yet. On a CPU a module has the whole device, unless a backend simulates quotas.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raymm.actors.executor.executor import StepClock, step_clock
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.quota import Backend, ConcurrentModules, CudaBackend, StreamPool, StreamSet, Work
from raymm.actors.rank.module_profiler import WARM_UP_RUNS, ModuleProfiler, ProfileRequest

WHOLE = 1.0


@dataclass(frozen=True)
class SurfaceRequest:
    """Request to measure a module.

    Attributes:
        input_gradients: True if encoder outputs that the module receives need gradients.
        quotas: shares of the device's multiprocessors; on a CPU only 1.
    """

    request: ProfileRequest
    input_gradients: bool
    quotas: tuple[float, ...] = (WHOLE,)


@dataclass(frozen=True)
class SurfaceTimes:
    """Measurements of a module.

    Attributes:
        seconds: time of forward and backward, by quota; without quotas that the device cannot
            grant.
        activation_bytes: activations of each layer, as if all of its parameters were trained.
    """

    seconds: dict[float, float]
    activation_bytes: tuple[int, ...]
    output_shape: tuple[int, ...]


class SurfaceProfiler(ModuleProfiler):
    """Profiler of one whole module as the run will train it; see :class:`ModuleProfiler`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._flags = [p.requires_grad for p in self._stage.parameters()]

    def surface(
        self, request: SurfaceRequest, repeats: int, backend: Backend | None = None
    ) -> SurfaceTimes:
        """Measure the median time of ``repeats`` iterations on every quota, after a warm-up.

        Args:
            backend: makes the quotas' streams; by default :class:`CudaBackend` on a GPU, none on a
                CPU.
        """
        inputs, received = self._arguments(request)
        counted = self._run(inputs, self._arguments(request)[1], trainable=True, count=True)
        self._restore()
        activations, shape = tuple(counted.held), counted.output_shape
        del counted
        if backend is None:
            if self._device.type != "cuda":
                return SurfaceTimes(
                    {WHOLE: self._median(inputs, received, repeats)}, activations, shape
                )
            backend = CudaBackend(self._device)
        seconds = {}
        possible = [q for q in request.quotas if q >= backend.gpu.smallest_quota]
        with StreamPool(backend, {f"{q:g}": {"module": q} for q in possible}) as pool:
            for quota in possible:
                stream = pool.select(f"{quota:g}").streams["module"]
                self._wait()
                with stream.use():
                    seconds[quota] = self._median(inputs, received, repeats)
            self._clear()
        return SurfaceTimes(seconds, activations, shape)

    def prepare(self, request: SurfaceRequest) -> None:
        """Create the inputs of :meth:`iterations` and run a first iteration. Disables dropout,
        which draws random numbers."""
        self._stage.eval()
        self._prepared: tuple[dict[str, Any], dict[str, Message]] | None = self._arguments(request)
        self._iterate(*self._prepared)

    def iterations(self, count: int) -> tuple[StepClock, Any, Any]:
        """Run ``count`` forwards and backwards; return a clock and its marks before and after
        them."""
        assert self._prepared is not None  # see prepare
        inputs, received = self._prepared
        clock = step_clock(self._device)
        start = clock.mark()
        for _ in range(count):
            self._iterate(inputs, received)
        return clock, start, clock.mark()

    def _arguments(self, request: SurfaceRequest) -> tuple[dict[str, Any], dict[str, Message]]:
        received = {
            name: Message((torch.randn(
                shape, device=self._device, requires_grad=request.input_gradients
            ),), {})
            for name, shape in request.request.received.items()
        }
        return to_device(request.request.inputs, self._device), received

    def _restore(self) -> None:
        """Restore the run's ``requires_grad`` flags, which :meth:`_run` changes."""
        for parameter, flag in zip(self._stage.parameters(), self._flags, strict=True):
            parameter.requires_grad_(flag)
        self._clear()

    def forget(self) -> None:
        """Drop gradients and inputs, so that their streams can be destroyed."""
        self._prepared = None
        self._clear()

    def _clear(self) -> None:
        for parameter in self._stage.parameters():
            parameter.grad = None

    def _median(
        self, inputs: dict[str, Any], received: dict[str, Message], repeats: int
    ) -> float:
        times = []
        for _ in range(WARM_UP_RUNS + repeats):
            self._wait()
            clock = step_clock(self._device)
            start = clock.mark()
            self._iterate(inputs, received)
            begin, end = clock.seconds([start, clock.mark()])
            times.append(end - begin)
        return statistics.median(times[WARM_UP_RUNS:])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _iterate(self, inputs: dict[str, Any], received: dict[str, Message]) -> None:
        """Run a forward, and a backward if anything needs a gradient."""
        gradients = any(self._flags) or any(m.tensors[0].requires_grad for m in received.values())
        with contextlib.nullcontext() if gradients else torch.no_grad():
            with self._casting():
                output = self._stage.run(
                    dict(inputs), received, MicrobatchContext(1)
                ).outputs[0]
            if output.requires_grad:
                output.backward(None if output.dim() == 0 else torch.ones_like(output))
        for message in received.values():
            message.tensors[0].grad = None


@dataclass(frozen=True)
class ColocatedTimes:
    """Seconds per iteration of a module, alone and next to others on the same multiprocessors."""

    alone: float
    colocated: float


class ColocationProfiler:
    """Profiler of several modules that share one GPU with quotas. Not yet run on a GPU."""

    def __init__(self, arguments: Mapping[str, tuple]) -> None:
        self._modules = {name: SurfaceProfiler(*options) for name, options in arguments.items()}

    def colocated_times(
        self,
        requests: Mapping[str, SurfaceRequest],
        groups: Sequence[Mapping[str, float]],
        expected: Sequence[Mapping[str, float]],
        backend: Backend | None = None,
    ) -> list[dict[str, ColocatedTimes]]:
        """Measure seconds per iteration of every module of every group, alone and next to the
        others.

        Both measurements use the same multiprocessors, because the rounding of quotas depends on
        the other modules; the difference is interference alone. Each module of a group runs enough
        iterations to take about as long as the slowest, so all modules run concurrently nearly all
        the time.

        Args:
            expected: for each group, approximate seconds by module at these quotas.
            backend: :class:`CudaBackend` by default.
        """
        backend = backend or CudaBackend()
        for name, request in requests.items():
            self._modules[name].prepare(request)
        times = []
        with ConcurrentModules() as threads, StreamPool(
            backend, {str(index): group for index, group in enumerate(groups)}
        ) as pool:
            for index, (group, seconds) in enumerate(zip(groups, expected, strict=True)):
                longest = max(seconds[name] for name in group) * 3
                counts = {name: math.ceil(longest / seconds[name]) for name in group}
                streams = pool.select(str(index))
                alone: dict[str, float] = {}
                for name in group:
                    alone |= self._timed(threads, streams, {name: counts[name]})
                colocated = self._timed(threads, streams, counts)
                times.append({name: ColocatedTimes(alone[name], colocated[name]) for name in group})
            for profiler in self._modules.values():
                profiler.forget()
        return times

    def _timed(
        self, threads: ConcurrentModules, streams: StreamSet, counts: Mapping[str, int]
    ) -> dict[str, float]:
        outputs = threads.run(streams, {
            name: Work(partial(self._modules[name].iterations, count), draws=False)
            for name, count in counts.items()
        })
        seconds = {}
        for name, output in outputs.items():
            clock, start, end = output.value
            begin, stop = clock.seconds([start, end])
            seconds[name] = (stop - begin) / counts[name]
        return seconds
