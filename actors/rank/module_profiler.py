"""Actor that measures one module: real layers on the real device, with no other rank next to it.

Measured are the start and end times of each layer, the bytes that it keeps for its backward, and
its peak memory.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.adapters.lora import has_adapters, is_adapter
from raymm.actors.host.gpus import check_gpu_node
from raymm.actors.memory.live_bytes import DeviceBytes, LiveBytes, LiveStorages, live_bytes
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name, hidden_state
from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.precision import ComputeCopies, cast_frozen, disable_tf32
from raymm.actors.recompute.recomputed_layers import layers_recomputed
from raymm.actors.sharding.parameter_shards import ShardPlan
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.language import LanguageStage
from raymm.kernels.collectives.tensor_group import LoneMember
from raymm.scheduler.costs.recomputation import OFFLOAD, REMADE, LayerBytes, LayerOption

WARM_UP_RUNS = 2
# Owner number for storages of the module's output.
_HANDED_ON = -1


@dataclass(frozen=True)
class ProfileRequest:
    """One microbatch to measure.

    Attributes:
        inputs: inputs of the module's first stage, with tensors on the CPU.
        received: for a language model, shape (items, tokens, width) of each encoder's output.
        plain_text: True if ``inputs`` already hold the whole sequence, without encoder outputs.
    """

    inputs: dict[str, Any]
    received: dict[str, tuple[int, ...]]
    plain_text: bool = False


@dataclass(frozen=True)
class LayerTimes:
    """Median times of one layer in seconds, and its memory in bytes.

    Attributes:
        forward, backward_input, backward_weight: F, B_d and B_w.
        activation_bytes: memory held for the backward: tensors created in the layer, and its input.
        output_bytes: size of the hidden state that the layer returns.
        working_bytes, forward_bytes, data_bytes, halved: see
            :class:`~raymm.scheduler.costs.layer_costs.LayerCost`.
        options: for a block, ways to recompute or offload its activations: seconds added to forward
            plus backward, bytes held, and peak working bytes.
    """

    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: int
    output_bytes: int
    options: tuple[LayerOption, ...] = ()
    working_bytes: int = 0
    forward_bytes: int = 0
    data_bytes: int = 0
    halved: LayerBytes | None = None


@dataclass(frozen=True)
class ModuleTimes:
    """Measurements of a module on one microbatch.

    Attributes:
        samples, tokens: counts in the hidden state (samples, length, width) that enters the blocks,
            or in the module's output if that hidden state has another shape.
    """

    layers: tuple[LayerTimes, ...]
    samples: int
    tokens: int
    output_shape: tuple[int, ...]


class ModuleProfiler:
    """Profiler of a whole module; :mod:`raymm.profiling.layers` wraps it in ``ray.remote``.

    Args:
        builder: builds the module's one stage (:func:`raymm.layout.stage_builders.stage_builders`).
        device: ``"cpu"`` or ``"cuda"``.
        autocast: name of autocast's dtype, or None.
        cast: True to keep frozen weights in the autocast dtype, as a rank does if it can reload
            them.
        threads: intra-op threads.
    """

    def __init__(
        self, builder: Callable[[], EncoderStage | LanguageStage], device: str,
        autocast: str | None, cast: bool, threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        disable_tf32()
        if self._device.type == "cuda":
            check_gpu_node()
        self._autocast = getattr(torch, autocast) if autocast else None
        stage = builder()
        # F depends on how frozen weights are kept: in the compute dtype, or in fp32, which autocast
        # casts in every forward.
        self._trainable = any(p.requires_grad for p in stage.parameters())
        if self._autocast is not None and cast:
            cast_frozen(stage, self._autocast)
        self._stage: EncoderStage | LanguageStage = stage.to(self._device)
        self._adapted = has_adapters(stage)
        self._merge: Any = getattr(stage.spec, "merge", None)
        self._layers, self._has_blocks = _layer_modules(stage)
        projector = getattr(stage, "projector", None)
        self._blocks = [layer for layer in self._layers if layer is not projector]

    def describe(self) -> dict[str, str]:
        """Return the device name and the versions that affect the measurements."""
        import transformers

        name = platform.processor() or platform.machine()
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        else:
            with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
                models = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
                name = models[0] if models else name
        return {
            "device": name, "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
        }

    def measure(self, request: ProfileRequest, repeats: int) -> ModuleTimes:
        """Run a microbatch ``repeats`` times each way, after a warm-up.

        B_d is the backward with every parameter frozen and the first block's input requiring a
        gradient. B_w is the additional time when all parameters, or all adapters if there are any,
        are trainable.
        """
        inputs, received = self._tensors_of(request)
        frozen: list[LayerTrace] = []
        trained: list[LayerTrace] = []
        for _ in range(WARM_UP_RUNS + repeats):
            frozen.append(self._run(inputs, received, trainable=False))
            trained.append(self._run(inputs, received, trainable=True))
        counted = self._run(inputs, received, trainable=True, count=True)
        frozen, trained = frozen[WARM_UP_RUNS:], trained[WARM_UP_RUNS:]
        options = self._options(inputs, received, repeats, trained)
        working, working_forward = self._layer_peaks(inputs, received, counted.held)
        data = sum(v.nbytes for v in inputs.values() if isinstance(v, torch.Tensor))
        for parameter in self._stage.parameters():
            parameter.grad = None
        runs = trained if self._trainable else frozen
        forward = _medians([run.forward_times() for run in runs])
        inner = _medians([run.backward_times() for run in frozen])
        full = _medians([run.backward_times() for run in trained])
        layers = tuple(
            LayerTimes(f, d, max(0.0, b - d), *sizes)
            for f, d, b, *sizes in zip(
                forward, inner, full, counted.held, counted.output_bytes, options, working,
                working_forward, [data, *[0] * (len(working) - 1)], strict=True,
            )
        )
        shape = counted.entering if len(counted.entering) == 3 else counted.output_shape
        return ModuleTimes(layers, shape[0], shape[0] * shape[1], counted.output_shape)

    def halve(self, plans: Mapping[str, ShardPlan]) -> None:
        """Shard the module as one of two processes with tensor parallelism holds it."""
        self._stage.shard_tensors(cast(Any, plans), LoneMember(2))

    def layer_bytes(self, request: ProfileRequest) -> tuple[LayerBytes, ...]:
        inputs, received = self._tensors_of(request)
        held, working, forward = self._bytes(inputs, received)
        options: list[tuple[LayerOption, ...]] = [()] * len(held)
        for name in self._option_names():
            with layers_recomputed(self._blocks, [name] * len(self._blocks)):
                less, beyond, _ = self._bytes(inputs, received)
            for index in range(len(self._blocks)):
                options[index] += (LayerOption(name, 0.0, less[index], beyond[index]),)
        for parameter in self._stage.parameters():
            parameter.grad = None
        return tuple(map(LayerBytes, held, working, forward, options))

    def _tensors_of(self, request: ProfileRequest) -> tuple[dict[str, Any], dict[str, Message]]:
        stage = self._stage
        if isinstance(stage, LanguageStage):
            stage.merge_by(Prepend() if request.plain_text else self._merge)
        return to_device(request.inputs, self._device), {
            name: Message((torch.randn(shape, device=self._device),), {})
            for name, shape in request.received.items()
        }

    def _option_names(self) -> tuple[str, ...]:
        # A frozen encoder has no backward. On a CPU, offloading to host memory saves nothing.
        if not self._has_blocks or not (self._trainable or isinstance(self._stage, LanguageStage)):
            return ()
        return (*REMADE, OFFLOAD) if self._device.type == "cuda" else REMADE

    def _options(
        self, inputs: dict[str, Any], received: dict[str, Message], repeats: int,
        kept: Sequence[LayerTrace],
    ) -> list[tuple[LayerOption, ...]]:
        """Return the recompute options of every layer; ``kept`` are runs that keep all
        activations."""
        blocks = self._blocks
        options: list[tuple[LayerOption, ...]] = [()] * len(self._layers)
        kinds = [(type(item), sum(p.numel() for p in item.parameters())) for item in blocks]
        kept_times = _medians([item.both_times() for item in kept])
        for name in self._option_names():
            with layers_recomputed(blocks, [name] * len(blocks)):
                runs = [self._run(inputs, received, trainable=True) for _ in range(repeats + 1)]
                held, working, _ = self._bytes(inputs, received)
            option_times = _medians([item.both_times() for item in runs[1:]])
            added = [option_times[index] - kept_times[index] for index in range(len(blocks))]
            # Small differences of noisy times are unreliable, so blocks of one kind share their
            # median.
            for index, kind in enumerate(kinds):
                alike = [
                    item for item, block_kind in zip(added, kinds, strict=True)
                    if block_kind == kind
                ]
                seconds = max(0.0, statistics.median(alike))
                options[index] += (
                    LayerOption(name, seconds, held[index], working[index]),
                )
        return options

    def _bytes(
        self, inputs: dict[str, Any], received: dict[str, Message]
    ) -> tuple[list[int], list[int], list[int]]:
        counted = self._run(inputs, received, trainable=True, count=True)
        return counted.held, *self._layer_peaks(inputs, received, counted.held)

    def _layer_peaks(
        self, inputs: dict[str, Any], received: dict[str, Message], held: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return working and forward bytes of every layer. Parameters must have gradients, as in
        every microbatch of a step except the first."""
        def run() -> torch.Tensor:
            with self._casting():
                message = self._stage.run(dict(inputs), received, MicrobatchContext(1))
            return message.outputs[0]

        copies = ComputeCopies([self._stage], self._autocast)
        with copies.shown(), live_bytes(self._device) as live:
            return layer_peaks(run, self._layers, live, held)

    def _run(
        self, inputs: dict[str, Any], received: dict[str, Message], trainable: bool,
        count: bool = False,
    ) -> LayerTrace:
        for name, parameter in self._stage.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(trainable and (not self._adapted or is_adapter(name)))
        # A run also makes the copies once per step, before its microbatches.
        with ComputeCopies([self._stage], self._autocast).shown() as copies:
            storages = None
            if count:
                values = [*inputs.values(), *(m.tensors[0] for m in received.values())]
                tensors = [value for value in values if isinstance(value, torch.Tensor)]
                state = [*self._stage.parameters(), *self._stage.buffers(), *copies]
                storages = LiveStorages([*state, *tensors])
            return self._traced(inputs, received, trainable, storages)

    def _traced(
        self, inputs: dict[str, Any], received: dict[str, Message], trainable: bool,
        storages: LiveStorages | None,
    ) -> LayerTrace:
        trace = LayerTrace(self._device, len(self._layers), storages)
        with trace.watching(self._layers, self._has_blocks, leaf=not trainable):
            with storages or contextlib.nullcontext(), self._casting():
                trace.start_forward()
                message = self._stage.run(dict(inputs), received, MicrobatchContext(1))
                output = message.outputs[0]
                trace.end_forward(output)
            gradient = None if output.dim() == 0 else torch.randn_like(output)
            trace.start_backward()
            output.backward(gradient)
            trace.end_backward()
        return trace

    def _casting(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


def _layer_modules(stage: EncoderStage | LanguageStage) -> tuple[list[nn.Module], bool]:
    """Return the first submodule of each layer (the blocks, or the whole module if it cannot be
    cut, and the projector), and True if the first layer is a block."""
    module = stage.module
    assert module is not None  # the profiled stage holds the whole module
    path = find_blocks(module)
    blocks: list[nn.Module] = list(block_list(module, path)) if path is not None else []
    has_blocks = len(blocks) > 1
    layers: list[nn.Module] = blocks if has_blocks else [module]
    projector = getattr(stage, "projector", None)
    return layers + ([projector] if projector is not None else []), has_blocks


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def layer_peaks(
    run: Callable[[], torch.Tensor], layers: Sequence[nn.Module], live: LiveBytes | DeviceBytes,
    held: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Measure peak bytes per layer; ``held`` are the bytes that each layer keeps for its backward.

    Returns:
        Per layer, the peak of forward and backward beyond the activations of this and earlier
        layers and the layer's output; and the peak of a forward without gradients.
    """
    initial = live.now
    marks = _Marks(live, len(layers))
    output = _marked(run, layers, marks)
    marks.end_forward()
    size = int(output.nbytes)
    gradient = None if output.dim() == 0 else torch.randn_like(output)
    live.restart()
    output.backward(gradient)
    marks.end_backward()
    del output, gradient
    alone, start = _Marks(live, len(layers)), live.now
    with torch.no_grad():
        _marked(run, layers, alone)
    alone.end_forward()
    working = [
        max(0, most - end, back - initial - held_so_far)
        for most, end, back, held_so_far in zip(
            marks.forward, marks.after, marks.backward, accumulate(held), strict=True
        )
    ]
    # The output of the last layer stays allocated until its backward has finished.
    working[-1] = max(0, working[-1] - size)
    return working, [most - start for most in alone.forward]


def _marked(
    run: Callable[[], torch.Tensor], layers: Sequence[nn.Module], marks: _Marks
) -> torch.Tensor:
    handles = [
        layer.register_forward_pre_hook(partial(marks.enter, index), with_kwargs=True)
        for index, layer in enumerate(layers) if index
    ]
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


class _Marks:
    """Peak bytes of every layer's forward and backward.

    Attributes:
        after: bytes alive after the layer's forward, including its output.
    """

    def __init__(self, live: LiveBytes | DeviceBytes, layers: int) -> None:
        self._live = live
        self.forward, self.after, self.backward = [0] * layers, [0] * layers, [0] * layers
        live.restart()

    def enter(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self._over(index)
        hidden = hidden_state(layer, args, kwargs)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._left(index))

    def _over(self, index: int) -> None:
        self.forward[index - 1], self.after[index - 1] = self._live.most, self._live.now
        self._live.restart()

    def _left(self, index: int) -> None:
        self.backward[index] = self._live.most
        self._live.restart()

    def end_forward(self) -> None:
        self._over(len(self.forward))

    def end_backward(self) -> None:
        self._left(0)


class LayerTrace:
    """Time marks and activation bytes of one forward and backward.

    Args:
        storages: tracks the bytes alive; None to measure time only.

    Attributes:
        held: bytes that each layer keeps for its backward.
        output_bytes: bytes of the hidden state that each layer returns.
        entering: shape of the hidden state that enters the first block.
    """

    def __init__(
        self, device: torch.device, layers: int, storages: LiveStorages | None = None
    ) -> None:
        self._cuda = device.type == "cuda"
        self._forward: dict[int, Any] = {}
        self._backward: dict[int, Any] = {}
        self._count = layers
        self._storages = storages
        self.held = [0] * layers
        self.output_bytes = [0] * layers
        self.output_shape: tuple[int, ...] = ()
        self.entering: tuple[int, ...] = ()

    @contextlib.contextmanager
    def watching(
        self, layers: Sequence[nn.Module], has_blocks: bool, leaf: bool
    ) -> Iterator[None]:
        """Hook the layers to record when each begins, for the length of the block.

        Args:
            layers: the first submodule of each layer.
            leaf: True to make the first layer's input a leaf of the autograd graph.
        """
        handles = []
        for index, module in enumerate(layers):
            def enter(layer: nn.Module, args: tuple, kwargs: dict, index: int = index) -> Any:
                return self._enter(layer, index, args, kwargs, has_blocks, leaf)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self, layer: nn.Module, index: int, args: tuple, kwargs: dict, has_blocks: bool, leaf: bool
    ) -> Any:
        if index:
            hidden = hidden_state(layer, args, kwargs)
            self._forward[index] = self._now()
            if self._storages is not None:
                self._storages.enter(index)
                self._storages.give(hidden, index)
            self.output_bytes[index - 1] = hidden.numel() * hidden.element_size()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._leave(index))
            return None
        names = [None] if has_blocks and args else list(kwargs)
        if has_blocks and not args:
            names = [hidden_name(layer)]
        changed = {}
        for name in names:
            value = args[0] if name is None else kwargs[name]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.entering = self.entering or tuple(value.shape)
                # The input gets a gradient in both runs, so that B_d is in both and the difference
                # is B_w.
                start = leaf or not value.requires_grad
                if self._storages is not None:
                    self._storages.give(value, 0)
                changed[name] = value.detach().requires_grad_() if start else value
        if None in changed:
            return (changed.pop(None), *args[1:]), kwargs
        return args, {**kwargs, **changed}

    def _leave(self, index: int) -> None:
        """Record the end of a layer's backward, when the gradient of its input is complete."""
        self._backward[index] = self._now()

    def start_forward(self) -> None:
        self._synchronize()
        self._forward[0] = self._now()

    def end_forward(self, output: torch.Tensor) -> None:
        self._forward[self._count] = self._now()
        self.output_bytes[-1] = output.numel() * output.element_size()
        self.output_shape = tuple(output.shape)
        if self._storages is not None:
            self._storages.give(output, _HANDED_ON)
            for layer, size in self._storages.alive():
                if layer != _HANDED_ON:
                    self.held[layer] += size

    def start_backward(self) -> None:
        self._synchronize()
        self._backward[self._count] = self._now()

    def end_backward(self) -> None:
        self._backward[0] = self._now()
        self._synchronize()

    def forward_times(self) -> list[float]:
        """Return seconds per layer, from the layer's start to the start of the next layer."""
        marks = [self._forward[i] for i in range(self._count + 1)]
        return [self._seconds(a, b) for a, b in zip(marks, marks[1:], strict=False)]

    def both_times(self) -> list[float]:
        pairs = zip(self.forward_times(), self.backward_times(), strict=True)
        return [forward + backward for forward, backward in pairs]

    def backward_times(self) -> list[float]:
        """Return seconds per layer, from the gradient of its output to the gradient of its
        input."""
        marks = [self._backward[0]]  # a layer that no gradient reaches takes no time
        for index in range(1, self._count + 1):
            marks.append(self._backward.get(index, marks[-1]))
        return [self._seconds(b, a) for a, b in zip(marks, marks[1:], strict=False)]

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start
