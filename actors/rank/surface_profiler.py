"""What an actor runs to measure scaling surfaces: whole modules, on quotas, concurrently.

Quotas and colocations need a GPU with green contexts (:mod:`raymm.actors.quota`); that part has
not run on one yet. On a CPU a module has the whole device, unless a backend pretends otherwise.
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

from raymm.actors.executor.step_clock import StepClock, step_clock
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.quota import Backend, ConcurrentModules, CudaBackend, StreamPool, StreamSet, Work
from raymm.actors.rank.module_profiler import WARM_UP_RUNS, ModuleProfiler, ProfileRequest

WHOLE = 1.0


@dataclass(frozen=True)
class SurfaceRequest:
    """What to measure of a module.

    Attributes:
        request: one GPU's samples.
        input_gradients: what it receives of encoders needs a gradient.
        quotas: shares of the device's multiprocessors; on a CPU only 1.
    """

    request: ProfileRequest
    input_gradients: bool
    quotas: tuple[float, ...] = (WHOLE,)


@dataclass(frozen=True)
class SurfaceTimes:
    """What was measured.

    Attributes:
        seconds: of a forward and backward, by quota; quotas below what the device can set apart
            are missing.
        activation_bytes: of each layer, as if everything in it were trained.
        output_shape: of what the module hands on.
    """

    seconds: dict[float, float]
    activation_bytes: tuple[int, ...]
    output_shape: tuple[int, ...]


class SurfaceProfiler(ModuleProfiler):
    """One module, whole, as the run will train it. Arguments as of :class:`ModuleProfiler`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._flags = [p.requires_grad for p in self._stage.parameters()]

    def surface(
        self, request: SurfaceRequest, repeats: int, backend: Backend | None = None
    ) -> SurfaceTimes:
        """Medians of ``repeats`` iterations on every quota, after a warm-up.

        Args:
            request: what to measure.
            repeats: iterations.
            backend: of the quotas; by default :class:`CudaBackend` on a GPU, and none elsewhere.
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
        """Inputs for :meth:`iterations`, and a first one, for kernels that are chosen at first
        use. From now on without dropout, which draws random numbers."""
        self._stage.eval()
        self._prepared: tuple[dict[str, Any], dict[str, Message]] | None = self._arguments(request)
        self._iterate(*self._prepared)

    def iterations(self, count: int) -> tuple[StepClock, Any, Any]:
        """A clock, and its marks on the current stream before and after so many forwards and
        backwards."""
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
        """Flags as the run has them, after :meth:`_run` set all of them."""
        for parameter, flag in zip(self._stage.parameters(), self._flags, strict=True):
            parameter.requires_grad_(flag)
        self._clear()

    def forget(self) -> None:
        """Let go of gradients and inputs; streams that they were made on can end then."""
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
        """A forward, and what there is of a backward."""
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
    """Seconds of an iteration of a module, alone and beside others, on the same
    multiprocessors."""

    alone: float
    colocated: float


class ColocationProfiler:
    """Several modules of one GPU, concurrently on quotas. Not yet run on a GPU.

    Args:
        arguments: of :class:`SurfaceProfiler`, by module.
    """

    def __init__(self, arguments: Mapping[str, tuple]) -> None:
        self._modules = {name: SurfaceProfiler(*options) for name, options in arguments.items()}

    def colocated_times(
        self,
        requests: Mapping[str, SurfaceRequest],
        groups: Sequence[Mapping[str, float]],
        expected: Sequence[Mapping[str, float]],
        backend: Backend | None = None,
    ) -> list[dict[str, ColocatedTimes]]:
        """Seconds of an iteration of every module of every group, alone and beside the others.

        Both on the same multiprocessors: quotas are granted in whole groups of these, and how
        they are rounded depends on who else has some. What a module loses beside the others is
        then interference alone.

        Modules of a group run as many iterations as make them about as long as the slowest, so
        that all of them have all others beside them nearly all the time.

        Args:
            requests: by module.
            groups: quotas by module.
            expected: about the seconds by module at these quotas, of each group.
            backend: of the device, if not :class:`CudaBackend`.
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
        """Seconds of an iteration of modules that run so many at the same time."""
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
