"""Bytes that autograd saves in a forward, and FLOPs that the shapes of weights do not show.

Both are observed in a run without values. :mod:`raymm.costs.workload` runs encoders, and puts the
figures into their load. Language models run here, on embeddings of one and two samples, since the
figures are linear in samples. Above :data:`MOST_TOKENS` tokens, the figures are extrapolated by a
parabola through three shorter lengths, since nothing grows faster than attention. An encoder whose
load only has a number of tokens runs on example inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.probe.example_inputs import example_inputs
from raymm.actors.weights.source import on_meta
from raymm.costs.load import Load
from raymm.costs.observed_load import Observation, observe
from raymm.errors import USER_CODE_RAISES, ModelError
from raymm.kernels.cross_entropy import token_cross_entropy_sum

# Longest sample that a language model runs on. A quarter of it is a multiple of the chunks that
# linear attention and state-space layers pad samples to.
MOST_TOKENS = 1024
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Maximum number of cached runs.
_MOST_RUNS = 1024
_EXAMPLE_TOKENS = 16
_FP32_BYTES = 4

Figures = tuple[float, ...]
_RUNS: dict[Any, Figures | None] = {}
_CONFIGURATIONS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class ForwardRun(NamedTuple):
    """Figures of the forward of a microbatch.

    Attributes:
        before, after: bytes that autograd saves before and after the blocks, without parameters.
            The head and the loss of a language model are after the blocks.
        blocks: bytes by block; empty for a module without blocks.
        mixing: by block, FLOPs of products of two activations without attention through
            transformers' interface, and True if the block has such attention.
    """

    before: float
    blocks: Figures
    after: float
    mixing: tuple[tuple[float, bool], ...]

    @property
    def layers(self) -> Figures:
        """Bytes by layer, with the layers of :func:`raymm.costs.layer_count.count_layers`."""
        if len(self.blocks) < 2:
            return (self.before + sum(self.blocks) + self.after,)
        first, *inner, last = self.blocks
        return (self.before + first, *inner, last + self.after)


def forward_run(
    module: nn.Module, load: Load, dtype: str, causal: bool = False
) -> ForwardRun | None:
    """Return the figures of a microbatch, as if all parameters (with adapters, all adapters) were
    trained. None if the module does not run without values. It may be on the meta device."""
    saved: Figures | None
    mixing = tuple((flops * load.total, attended) for flops, attended in load.mixing)
    if load.kept:
        size = DTYPES[dtype].itemsize
        saved = tuple((half * size + full * _FP32_BYTES) * load.total for half, full in load.kept)
    elif causal:
        saved = _language_figures(module, load, dtype)
    else:
        saved = _encoder_bytes(module, load, dtype)
    if saved is None:
        return None
    if causal and not load.kept:
        third = len(saved) // 3
        saved, flops, attended = (saved[i * third : (i + 1) * third] for i in range(3))
        mixing = tuple(zip(flops[1:-2], (share > 0.5 for share in attended[1:-2]), strict=True))
    labels = load.total if load.labels is None else load.labels
    embeddings, *blocks, after, head = saved
    return ForwardRun(embeddings, tuple(blocks), after + head * labels / load.total, mixing)


def kept_elements(
    fp32: Observation, bf16: Observation, tokens: int
) -> tuple[tuple[float, float], ...]:
    """Return the elements that autograd saves per token in the compute dtype and in fp32, as
    ``kept`` of a :class:`~raymm.costs.load.Load`. ``fp32`` and ``bf16`` are the same forward
    without and with autocast. Empty if a forward did not finish."""
    if fp32.output is None or bf16.output is None or not tokens:
        return ()
    halves = [max(0.0, (a - b) / 2) for a, b in zip(fp32.kept, bf16.kept, strict=True)]
    return tuple(
        (half / tokens, (size / _FP32_BYTES - half) / tokens)
        for half, size in zip(halves, fp32.kept, strict=True)
    )


def _language_figures(module: nn.Module, load: Load, dtype: str) -> Figures | None:
    if load.samples <= 2:
        return _of_rows(module, load.samples, load.tokens, dtype)
    single = _of_rows(module, 1, load.tokens, dtype)
    double = _of_rows(module, 2, load.tokens, dtype)
    if single is None or double is None:
        return None
    return tuple(a + (load.samples - 1) * (b - a) for a, b in zip(single, double, strict=True))


def _of_rows(module: nn.Module, samples: int, tokens: int, dtype: str) -> Figures | None:
    if tokens <= MOST_TOKENS:
        return _language_run(module, samples, tokens, dtype)
    lengths = MOST_TOKENS // 4, MOST_TOKENS // 2, MOST_TOKENS
    runs = [_language_run(module, samples, length, dtype) for length in lengths]
    total = [0.0] * len(runs[0] or ())
    for length, run in zip(lengths, runs, strict=True):
        if run is None:
            return None
        weight = 1.0
        for node in lengths:
            if node != length:
                weight *= (tokens - node) / (length - node)
        total = [value + weight * size for value, size in zip(total, run, strict=True)]
    return tuple(max(0.0, size) for size in total)


def _language_run(module: nn.Module, samples: int, tokens: int, dtype: str) -> Figures | None:
    key = _configuration(module), samples, tokens, dtype
    if key not in _RUNS:
        observed = _observed_language(module, samples, tokens, dtype)
        figures = () if observed is None else (*observed.kept, *observed.mixing, *observed.attended)
        _remember(key, tuple(map(float, figures)) or None)
    return _RUNS[key]


def _observed_language(
    module: nn.Module, samples: int, tokens: int, dtype: str
) -> Observation | None:
    try:
        copy = on_meta(module)
        width = input_embeddings(copy).weight.shape[1]
    except USER_CODE_RAISES:  # not a language model of transformers
        return None

    def run(embeddings: torch.Tensor, targets: torch.Tensor) -> None:
        logits = copy(inputs_embeds=embeddings.requires_grad_(), use_cache=False).logits
        token_cross_entropy_sum(logits.flatten(0, 1), targets)

    inputs = {
        "embeddings": torch.empty(samples, tokens, width, device="meta"),
        "targets": torch.zeros(samples * tokens, dtype=torch.int64),
    }
    (observation,) = observe(run, inputs, copy, masks=False, dtype=DTYPES[dtype], few=True)
    return None if observation.output is None else observation


def _encoder_bytes(module: nn.Module, load: Load, dtype: str) -> Figures | None:
    """Return the bytes for the load's tokens, at the rate of example inputs."""
    key = _configuration(module), dtype
    if key not in _RUNS:
        _remember(key, _example_bytes(module, dtype))
    rate = _RUNS[key]
    return None if rate is None else tuple(size * load.total for size in rate)


def _example_bytes(module: nn.Module, dtype: str) -> Figures | None:
    """Return the bytes per token of the blocks, on example inputs."""
    try:
        copy = on_meta(module)
        inputs = _example(copy)
    except USER_CODE_RAISES:  # the module may be of any kind
        return None
    (observation,) = observe(copy, inputs, copy, masks=False, dtype=DTYPES[dtype])
    if observation.output is None or not observation.tokens:
        return None
    return tuple(size / (observation.rows * observation.tokens) for size in observation.kept)


def _example(module: nn.Module) -> dict[str, Any]:
    try:
        return example_inputs(module)
    except ModelError:  # features as wide as the first weight instead
        name = next(iter(inspect.signature(module.forward).parameters))
        width = next(p.shape[1] for p in module.parameters() if p.dim() == 2)
        return {name: torch.empty(1, _EXAMPLE_TOKENS, width)}


def _remember(key: Any, figures: Figures | None) -> None:
    if len(_RUNS) >= _MOST_RUNS:
        _RUNS.clear()
    _RUNS[key] = figures


def _configuration(module: nn.Module) -> Any:
    """Return a key that modules with the same structure share."""
    if module not in _CONFIGURATIONS:
        config = getattr(module, "config", None)
        text = getattr(config, "to_json_string", lambda **_: "")(use_diff=False)
        _CONFIGURATIONS[module] = (
            text, module.training,
            tuple((name, type(child)) for name, child in module.named_modules()),
            tuple((name, p.shape, p.dtype) for name, p in module.named_parameters()),
        )
    return _CONFIGURATIONS[module]
