"""Analytic costs: what a model's layers would take on a named device, without weights or GPU.

A layer's time is its roofline: the larger of FLOPs at the rate that matrix products reach and
of bytes at the memory's bandwidth. FLOPs and bytes come from :mod:`raymm.costs.layer_count`.

- Forward: products with weights, and attention.
- B_d: the same products again (the output's gradient times each weight), and 2.5 times the
  forward's attention: of flash attention's five backward products one recomputes the scores,
  the forward has two (Dao, FlashAttention-2, section 3.1.2).
- B_w: the products once more (input times the output's gradient), but for weights under adapters;
  attention has no weights. Other products of two activations, such as scans, are two products each
  in B_d.

Blocks hand on fp32 in both dtypes: under autocast the residual stream starts with an fp32
embedding and stays that.

- Blocks that make activations again (:data:`raymm.scheduler.costs.recomputation.OPTIONS`) run their
  products again; what is no product takes as long as reading and writing it. Copies to the
  host's memory and back are hidden by the layer's own forward and backward, as far as those
  last.

Not counted: communication between the processes of a rank (that is
:mod:`raymm.scheduler.schedule.process_costs`), the optimizer, and work that is no product (norms,
activation functions, rotary tables), which fusion may or may not hide. For planning, ratios
between layers matter more than their absolute size.

Bytes are those of torch's own operators under autocast: each product casts a norm's fp32 output for
itself, and in a backward the gradients of the widest product are there before and after its
activation function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from raymm.costs.forward_run import forward_run
from raymm.costs.layer_count import LayerCount, count_blocks, count_layers
from raymm.costs.load import Load, default_tokens
from raymm.errors import PlanError
from raymm.model.module_kind import LANGUAGE_MODEL, ModuleKind, module_kind
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.scheduler.costs.devices import DeviceSpec, find_device
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.recomputation import ALL, ATTENTION, MATMULS, OFFLOAD, LayerOption

ATTENTION_BACKWARD = 2.5
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_FP32_BYTES = 4


def analytic_profile(
    model: MultimodalModule | WholeModel,
    loads: Mapping[str, Load],
    device: DeviceSpec | str,
    dtype: str = "bf16",
    *,
    tp: int | Mapping[str, int] = 1,
    cp: int | Mapping[str, int] = 1,
) -> CostProfile:
    """Costs of every layer of a model on one microbatch.

    Args:
        model: the description; only its structure is used.
        loads: per module, what a microbatch is to it. The language model's (``"llm"``) is
            required, with its merged length. An encoder without one gets an item per sample of
            the language model, with as many tokens as its config says. The projector works on
            its encoder's tokens.
        device: a device, or the name of one in :data:`raymm.scheduler.costs.devices.DEVICES`.
        dtype: compute dtype, ``"bf16"`` or ``"fp32"``.
        tp, cp: size of the tensor and context parallel group that acts as one rank, for all
            modules or per module. Times and activations are those of one of its GPUs: divided
            by both; parameters are divided by ``tp``, outputs by ``cp``.

    Raises:
        PlanError: on a module that does not exist, or one whose load is missing.
        PlanError: on an unknown device, or a dtype it has no rate for.
    """
    device = find_device(device) if isinstance(device, str) else device
    names = model.module_names
    if unknown := set(loads) - set(names):
        raise PlanError(f"loads name {sorted(unknown)}; the model's modules are {list(names)}")
    if LANGUAGE_MODEL not in loads:
        raise PlanError(f"loads lack {LANGUAGE_MODEL!r}: give Load(samples, merged tokens)")
    layers: dict[str, tuple[LayerCost, ...]] = {}
    tokens: dict[str, int] = {}
    for name in names:
        spec = model.spec(name)
        causal = module_kind(name) is ModuleKind.LANGUAGE_MODEL
        skeleton = spec.source.skeleton()
        load = loads.get(name) or Load(loads[LANGUAGE_MODEL].samples, default_tokens(skeleton))
        sizes = {"tp": _size("tp", tp, name), "cp": _size("cp", cp, name)}
        layers[name] = analytic_layers(skeleton, load, device, dtype, causal=causal, **sizes)
        projector = getattr(spec, "projector", None)
        if projector is not None:
            layers[name] += projector_layers(projector.skeleton(), load, device, dtype, **sizes)
        tokens[name] = load.total
    return CostProfile(layers, device.name, dtype, "analytic", tokens)


def analytic_layers(
    module: nn.Module,
    load: Load,
    device: DeviceSpec | str,
    dtype: str = "bf16",
    *,
    causal: bool = False,
    tp: int = 1,
    cp: int = 1,
) -> tuple[LayerCost, ...]:
    """Costs of one module's layers (without projector).

    Args:
        module: a skeleton; parameters may be on the meta device.
        load: what it has to do.
        device, dtype, tp, cp: as for :func:`analytic_profile`.
        causal: whether it is a causal language model, with head and loss.
    """
    device = find_device(device) if isinstance(device, str) else device
    seconds = _Roofline(device, dtype, tp, cp, _FP32_BYTES)
    run = forward_run(module, load, dtype, causal)
    blocks = count_blocks(module, load, causal, run)
    layers = seconds.costs(count_layers(module, load, causal, run), run and run.layers)
    of_blocks = [None] * len(blocks) if run is None else run.blocks
    return tuple(
        replace(layer, options=seconds.options(block, bytes_, layer.activation_bytes))
        for layer, block, bytes_ in zip(layers, blocks, of_blocks, strict=True)
    ) if blocks else layers


def projector_layers(
    projector: nn.Module,
    load: Load,
    device: DeviceSpec | str,
    dtype: str = "bf16",
    *,
    tp: int = 1,
    cp: int = 1,
) -> tuple[LayerCost, ...]:
    """The cost of a projector as its encoder's last layer, one entry.

    Args:
        projector: a skeleton; parameters may be on the meta device.
        load: the encoder's.
        device, dtype, tp, cp: as for :func:`analytic_profile`.
    """
    device = find_device(device) if isinstance(device, str) else device
    # The last product gives the compute dtype.
    output_bytes = _ELEMENT_BYTES.get(dtype, _FP32_BYTES)
    seconds = _Roofline(device, dtype, tp, cp, output_bytes)
    counts = count_layers(projector, load.of_projector())
    total = sum(counts, LayerCount())
    total = replace(total, output_elements=counts[-1].output_elements)
    run = forward_run(projector, load.of_projector(), dtype)
    return seconds.costs((total,), None if run is None else (sum(run.layers),))


def _size(what: str, value: int | Mapping[str, int], module: str) -> int:
    size = value.get(module, 1) if isinstance(value, Mapping) else value
    if type(size) is not int or size < 1:
        raise PlanError(f"{what} of {module!r} is {size!r}; it must be a whole number >= 1")
    return size


class _Roofline:
    """Times of counted layers on one GPU of a tensor and context parallel group."""

    def __init__(
        self, device: DeviceSpec, dtype: str, tp: int, cp: int, output_bytes: int
    ) -> None:
        self._output_bytes = output_bytes
        self._rate = device.peak(dtype) * device.efficiency
        self._bandwidth = device.memory_bandwidth
        self._to_host = device.to_host
        self._bytes = _ELEMENT_BYTES[dtype]
        self._tp, self._cp = tp, cp

    def _seconds(self, flops: float, traffic: float, weights: float) -> float:
        shared = self._tp * self._cp
        bytes_moved = traffic / shared + weights / self._tp
        return max(flops / shared / self._rate, bytes_moved / self._bandwidth)

    def _kept(self, count: LayerCount, kept: float | None) -> float:
        """Bytes that autograd saves; of a module that was not seen to run, as many elements as its
        products and its attention read and write."""
        if kept is None:
            kept = count.traffic_elements * self._bytes
        return kept / (self._tp * self._cp)

    def costs(
        self, counts: Sequence[LayerCount], kept: Sequence[float] | None
    ) -> tuple[LayerCost, ...]:
        """Return the costs of layers.

        Args:
            counts: by layer.
            kept: bytes that autograd saves by layer; None where they are not known.
        """
        every = [None] * len(counts) if kept is None else kept
        return tuple(self.cost(*pair) for pair in zip(counts, every, strict=True))

    def options(
        self, block: LayerCount, kept: float | None, activation_bytes: int
    ) -> tuple[LayerOption, ...]:
        """What a layer may do with the activations of its block. What is outside the block is
        kept; what is no product is as long as its traffic."""
        cost = self.cost(block, kept)
        kept = self._kept(block, kept)
        outside = activation_bytes - round(kept)
        shared = self._tp * self._cp
        stream = block.output_elements * _FP32_BYTES / self._cp
        attention = block.attention_elements * self._bytes / shared
        products = block.product_elements * self._bytes / shared
        remade = max(0.0, kept - products - attention) + products
        without_attention = self._seconds(
            block.matmul_flops + block.mixing_flops,
            (block.traffic_elements - block.attention_traffic) * self._bytes,
            block.weight_elements * self._bytes,
        )
        candidates = [
            (MATMULS, remade / self._bandwidth, stream + products + attention),
            (ATTENTION, without_attention, stream + attention),
            (ALL, cost.forward, stream),
        ]
        if self._to_host is not None:
            way = kept / self._to_host
            backward = cost.backward_input + cost.backward_weight
            hidden = max(0.0, way - cost.forward) + max(0.0, way - backward)
            candidates.append((OFFLOAD, hidden, 0.0))
        return tuple(
            LayerOption(name, seconds, outside + round(held))
            for name, seconds, held in candidates if held < kept
        )

    def cost(self, count: LayerCount, kept: float | None) -> LayerCost:
        """Of a layer, or a part of one, with the bytes that autograd saves."""
        traffic = count.traffic_elements * self._bytes
        weights = count.weight_elements * self._bytes
        return LayerCost(
            forward=self._seconds(
                count.matmul_flops + count.attention_flops + count.mixing_flops
                + count.weight_flops * self._cp, traffic, weights,
            ),
            backward_input=self._seconds(
                count.matmul_flops + ATTENTION_BACKWARD * count.attention_flops
                + 2 * count.mixing_flops, traffic, weights,
            ),
            # The weights' gradients are written in fp32.
            backward_weight=self._seconds(
                count.matmul_flops - count.base_flops, count.trained_traffic * self._bytes,
                (count.weight_elements - count.base_weights) * _FP32_BYTES,
            ),
            activation_bytes=round(self._kept(count, kept)),
            parameter_bytes=round(count.parameters * _FP32_BYTES / self._tp),
            output_bytes=round(count.output_elements * self._output_bytes / self._cp),
            replicated_bytes=min(
                count.replicated * _FP32_BYTES, round(count.parameters * _FP32_BYTES / self._tp)
            ),
            key_value_bytes=round(
                count.key_value_elements * self._bytes / (self._tp * self._cp)
            ),
            working_bytes=round(self._working(count)),
            forward_bytes=round(self._forward(count)),
            data_bytes=round(count.data_elements * _FP32_BYTES),
            base_bytes=min(
                round(count.base_parameters * _FP32_BYTES / self._tp),
                round(count.parameters * _FP32_BYTES / self._tp),
            ),
            few_bytes=round(count.few_parameters * _FP32_BYTES / self._tp),
            few_heads=count.few_heads,
            tied_bytes=round(count.tied * _FP32_BYTES / self._tp),
            quantised=count.quantised_share,
            expert_bytes=round(count.expert_parameters * _FP32_BYTES / self._tp),
            exchange_bytes=round(count.exchange_elements * _FP32_BYTES / self._cp),
        )

    def _working(self, count: LayerCount) -> float:
        """Bytes of gradients that are under way in a backward: of the hidden state, in fp32, and of
        the widest product before and after its activation function, or of that and a weight; or of
        logits, in the compute dtype and in fp32."""
        shared = self._tp * self._cp
        stream = count.stream_elements * _FP32_BYTES / self._cp
        widest = count.widest_elements * self._bytes / shared
        weight = count.largest_weight * self._bytes / self._tp
        logits = count.logits * (self._bytes + _FP32_BYTES) / shared
        return max(stream + widest + max(widest, weight), logits)

    def _forward(self, count: LayerCount) -> float:
        """Bytes that a forward has which keeps nothing: the hidden state before and after
        attention, and a norm's two of it, and the widest product with what is made of it; or one
        of it, and logits in the compute dtype and in fp32."""
        shared = self._tp * self._cp
        stream = count.stream_elements * _FP32_BYTES / self._cp
        logits = count.logits * (self._bytes + _FP32_BYTES) / shared
        return max(4 * stream + count.expanded_elements * self._bytes / shared, stream + logits)
