"""Analytic costs of a model's layers on a named device, without weights or a GPU.

A layer's time is its roofline: the maximum of its FLOPs at the rate that matrix products reach and
its bytes at the memory bandwidth. FLOPs and bytes come from :mod:`raymm.costs.layer_count`.

- Forward: products with weights, and attention.
- B_d: the same products (output gradient times weight), and 2.5 times the forward's attention. Of
  the five backward products of flash attention one recomputes the scores, and the forward has two
  (Dao, FlashAttention-2, section 3.1.2).
- B_w: the products once more (input times output gradient), except for weights under adapters.
  Attention has no weights. Other products of two activations, such as scans, are two products each
  in B_d.
- Recomputation (:data:`raymm.scheduler.costs.recomputation.OPTIONS`): products run again, and
  everything else takes as long as reading and writing its bytes. Offload to host memory is hidden
  by the layer's own forward and backward as far as these last.

Blocks output fp32 in both dtypes: under autocast the residual stream starts with an fp32 embedding
and stays fp32. Bytes are those of torch's own operators under autocast: each product casts the fp32
output of a norm again, and a backward holds the gradients of the widest product before and after
its activation function.

Not counted: communication between the processes of a rank (see
:mod:`raymm.scheduler.schedule.process_costs`), the optimizer, and work outside of products (norms,
activation functions, rotary tables), which fusion may hide. For planning, ratios between layers
matter more than absolute times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from raymm.costs.forward_run import forward_run
from raymm.costs.layer_count import LayerCount, count_blocks, count_layers
from raymm.costs.load import Load, default_tokens
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.scheduler.costs.devices import DeviceSpec, find_device
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.recomputation import ALL, ATTENTION, MATMULS, OFFLOAD, LayerOption

ATTENTION_BACKWARD = 2.5
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_FP32_BYTES = 4


def analytic_profile(
    model: Model,
    loads: Mapping[str, Load],
    device: DeviceSpec | str,
    dtype: str = "bf16",
    *,
    tp: int | Mapping[str, int] = 1,
    cp: int | Mapping[str, int] = 1,
) -> CostProfile:
    """Return the costs of every layer of a model on one microbatch. Raise a ``PlanError`` for an
    unknown module or device, a missing load, or a dtype that the device has no rate for.

    Args:
        model: only its structure is used.
        loads: load of a microbatch by module. ``"llm"``, with its merged length, is required. An
            encoder without a load gets one item per sample of the language model, with the tokens
            of its config. A projector has its encoder's tokens.
        dtype: compute dtype, ``"bf16"`` or ``"fp32"``.
        tp, cp: size of the tensor and context parallel group of a rank, for all modules or by
            module. Results are per GPU: times and activations are divided by both, parameters by
            ``tp``, outputs by ``cp``.
    """
    device = find_device(device) if isinstance(device, str) else device
    names, language_model = model.module_names, model.text_module
    if unknown := set(loads) - set(names):
        raise PlanError(f"loads name {sorted(unknown)}; the model's modules are {list(names)}")
    if language_model not in loads:
        raise PlanError(f"loads lack {language_model!r}: give Load(samples, merged tokens)")
    layers: dict[str, tuple[LayerCost, ...]] = {}
    tokens: dict[str, int] = {}
    for name in names:
        spec = model.spec(name)
        causal = name == language_model
        skeleton = spec.source.skeleton()
        load = loads.get(name) or Load(loads[language_model].samples, default_tokens(skeleton))
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
    """Return the costs of a module's layers, without a projector. The module may be on the meta
    device. See :func:`analytic_profile` for ``device``, ``dtype``, ``tp`` and ``cp``."""
    device = find_device(device) if isinstance(device, str) else device
    seconds = _Roofline(device, dtype, tp, cp, _FP32_BYTES)
    run = forward_run(module, load, dtype, causal)
    blocks = count_blocks(module, load, causal, run)
    layers = seconds.costs(count_layers(module, load, causal, run), run and run.layers)
    block_bytes = [None] * len(blocks) if run is None else run.blocks
    return tuple(
        replace(layer, options=seconds.options(block, bytes_, layer.activation_bytes))
        for layer, block, bytes_ in zip(layers, blocks, block_bytes, strict=True)
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
    """Return the cost of a projector as its encoder's last layer, one entry. ``load`` is the
    encoder's; see :func:`analytic_layers` for the other arguments."""
    device = find_device(device) if isinstance(device, str) else device
    # The last product outputs the compute dtype.
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

    def __init__(self, device: DeviceSpec, dtype: str, tp: int, cp: int, output_bytes: int) -> None:
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
        """Return the bytes that autograd saves. If no run of the module was observed, these are the
        elements that its products and its attention read and write."""
        if kept is None:
            kept = count.traffic_elements * self._bytes
        return kept / (self._tp * self._cp)

    def costs(
        self, counts: Sequence[LayerCount], kept: Sequence[float] | None
    ) -> tuple[LayerCost, ...]:
        """Return the costs of layers, given the bytes that autograd saves by layer, or None if
        unknown."""
        every = [None] * len(counts) if kept is None else kept
        return tuple(self.cost(*pair) for pair in zip(counts, every, strict=True))

    def options(
        self, block: LayerCount, kept: float | None, activation_bytes: int
    ) -> tuple[LayerOption, ...]:
        """Return the options of a layer for the activations of its block. Activations outside the
        block are kept, and work outside of products takes as long as its traffic."""
        cost = self.cost(block, kept)
        kept = self._kept(block, kept)
        outside_bytes = activation_bytes - round(kept)
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
            copy_seconds = kept / self._to_host
            backward = cost.backward_input + cost.backward_weight
            hidden = max(0.0, copy_seconds - cost.forward) + max(0.0, copy_seconds - backward)
            candidates.append((OFFLOAD, hidden, 0.0))
        return tuple(
            LayerOption(name, seconds, outside_bytes + round(held_bytes))
            for name, seconds, held_bytes in candidates if held_bytes < kept
        )

    def cost(self, count: LayerCount, kept: float | None) -> LayerCost:
        """Return the cost of a layer or a part of it, given the bytes that autograd saves."""
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
            key_value_bytes=round(count.key_value_elements * self._bytes / (self._tp * self._cp)),
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
        """Return the peak bytes of gradients in a backward: the fp32 hidden state and the widest
        product before and after its activation function (or that product and a weight), or the
        logits in the compute dtype and in fp32."""
        shared = self._tp * self._cp
        stream = count.stream_elements * _FP32_BYTES / self._cp
        widest = count.widest_elements * self._bytes / shared
        weight = count.largest_weight * self._bytes / self._tp
        logits = count.logits * (self._bytes + _FP32_BYTES) / shared
        return max(stream + widest + max(widest, weight), logits)

    def _forward(self, count: LayerCount) -> float:
        """Return the peak bytes of a forward that keeps nothing: four hidden states (around
        attention, and two of a norm) and the widest product with its results, or one hidden state
        and the logits in the compute dtype and in fp32."""
        shared = self._tp * self._cp
        stream = count.stream_elements * _FP32_BYTES / self._cp
        logits = count.logits * (self._bytes + _FP32_BYTES) / shared
        return max(4 * stream + count.expanded_elements * self._bytes / shared, stream + logits)
