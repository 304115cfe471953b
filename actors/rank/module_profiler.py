"""Actor that measures one module: real layers on the real device, with no other rank next to it."""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.adapters.lora import has_adapters, is_adapter
from raymm.actors.host.gpus import check_gpu_node
from raymm.actors.memory.live_bytes import live_bytes
from raymm.actors.memory.live_storages import LiveStorages
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.precision import ComputeCopies, cast_frozen, disable_tf32
from raymm.actors.rank.layer_peaks import layer_peaks
from raymm.actors.rank.layer_trace import LayerTrace
from raymm.actors.recompute.recomputed_layers import layers_recomputed
from raymm.actors.sharding.parameter_shards import ShardPlan
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.language import LanguageStage
from raymm.kernels.collectives.tensor_group import LoneMember
from raymm.scheduler.costs.recomputation import OFFLOAD, REMADE, LayerBytes, LayerOption

WARM_UP_RUNS = 2


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
        self._merge = getattr(stage.spec, "merge", None)
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
            stage.spec = replace(
                stage.spec, merge=Prepend() if request.plain_text else self._merge
            )
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
