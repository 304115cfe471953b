"""Exact FLOPs of a training step with its real lengths, items and masks, without padding.

Only necessary work counts (PaLM, appendix B), not recomputation, masked pairs or padding. A product
with a weight counts once for the forward, once if gradients are passed to an earlier layer, and
once if the weight is trained. Every product of two activations (attention, scans, linear attention)
counts twice in the backward. Counts per token, sample, label and visible pair come from
:mod:`raymm.costs.layer_count`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.merge import Prepend
from raymm.costs.forward_run import MOST_TOKENS, forward_run
from raymm.costs.layer_count import count_attention, count_blocks, count_layers
from raymm.costs.load import Load
from raymm.costs.workload import encoder_tokens
from raymm.data import MicrobatchMeta
from raymm.errors import PlanError
from raymm.kernels.mask.spans import Span
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.costs.layer_costs import trainable_before

ATTENTION_BACKWARD = 2.0
# Number of rows whose masks are cached.
_MASKS_KEPT = 4096


@dataclass(frozen=True)
class ModuleFlops:
    """FLOPs of a module in a training step.

    Attributes:
        per_token, per_sample, per_label: products with weights. Scans and linear attention are in
            ``per_token``.
        per_pair: attention per visible pair of a query and a key, by window (None: no window).
    """

    per_token: float = 0.0
    per_sample: float = 0.0
    per_label: float = 0.0
    per_pair: Mapping[int | None, float] | None = None

    def __add__(self, other: ModuleFlops) -> ModuleFlops:
        pairs = dict(self.per_pair or {})
        for window, flops in (other.per_pair or {}).items():
            pairs[window] = pairs.get(window, 0.0) + flops
        return ModuleFlops(
            self.per_token + other.per_token, self.per_sample + other.per_sample,
            self.per_label + other.per_label, pairs,
        )

    def __mul__(self, factor: float) -> ModuleFlops:
        return ModuleFlops(
            self.per_token * factor, self.per_sample * factor, self.per_label * factor,
            {window: flops * factor for window, flops in (self.per_pair or {}).items()},
        )


def module_flops(
    module: nn.Module, trainable: Sequence[bool], before: Sequence[bool], causal: bool = False,
    first: int = 0,
) -> ModuleFlops:  # fmt: skip
    """Return the FLOPs of one module in a training step, from layer ``first`` on.

    Args:
        module: a skeleton; parameters may be on the meta device.
        before: by layer, True if an earlier layer is trained.
    """
    total = ModuleFlops()
    layer_products = _products(module, causal, count_layers)
    blocks = _products(module, causal, count_blocks) or layer_products
    base = _products(module, causal, count_layers, "base_flops")
    activations = activation_flops(module, causal)
    for layer, (trained, earlier) in enumerate(zip(trainable, before, strict=True)):
        if layer < first:
            continue
        backward = float(trained or earlier)
        # Modules before the blocks pass no gradient back if nothing before them is trained.
        outer_flops = layer_products[layer] + blocks[layer] * -1.0
        first = layer == 0 and len(trainable) > 1
        total += blocks[layer] * (1 + backward + trained)
        total += outer_flops * (1 + (earlier if first else backward) + trained)
        total += base[layer] * -float(trained)
        total += activations[layer] * (1 + ATTENTION_BACKWARD * backward)
    return total


def activation_flops(
    module: nn.Module, causal: bool, load: Load | None = None
) -> list[ModuleFlops]:
    """Return FLOPs of products of two activations in a forward, by layer: attention per pair, other
    products per token of ``load``. By default, a language model runs on a sample whose length is a
    multiple of the chunks of linear attention."""
    run = None
    if causal or load is not None:
        load = load or Load(1, MOST_TOKENS // 4)
        run = forward_run(module, load, "bf16", causal)
    load = load or Load(1, 1)
    counts = count_layers(module, load, causal, run)
    return [
        ModuleFlops(count.mixing_flops / load.total, per_pair=pairs)
        for count, pairs in zip(counts, count_attention(module, causal, run), strict=True)
    ]


def _projector_flops(projector: nn.Module, trained: bool, earlier: bool) -> ModuleFlops:
    """Return the FLOPs of a projector, which is one layer of the graph. Its first product passes a
    gradient back only if something before the projector is trained."""
    total = ModuleFlops()
    base = _products(projector, False, count_layers, "base_flops")
    for index, products in enumerate(_products(projector, False, count_layers)):
        onward = earlier or trained and index > 0
        total += products * (1 + onward + trained) + base[index] * -float(trained)
    return total


def _products(
    module: nn.Module, causal: bool, count: Any, field: str = "matmul_flops"
) -> list[ModuleFlops]:
    """Return products with weights by layer; counts are linear in tokens, samples and labels."""

    def of(samples: int, tokens: int, labels: int) -> list[float]:
        layers = count(module, Load(samples, tokens, labels), causal)
        return [getattr(layer, field) for layer in layers]

    # One token of one sample, two tokens of one sample, and one token with a label.
    base, two, label = of(1, 1, 0), of(1, 2, 0), of(1, 1, 1)
    return [ModuleFlops(c - b, 2 * b - c, a - b) for b, c, a in zip(base, two, label, strict=True)]


class StepFlops:
    """Counts the FLOPs of a run's steps from the structure of the model. Raises PlanError if a
    layer cannot be counted."""

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model
        graph = module_graph(model)
        trained_before = trainable_before(graph)
        self._flops: dict[str, ModuleFlops] = {}
        self._featured: dict[str, ModuleFlops] = {}
        self._projectors: dict[str, ModuleFlops] = {}
        for node in graph.nodes:
            name, earlier = node.name, list(trained_before[node.name])
            trainable = list(node.trainable)
            causal = name == model.text_module
            spec = model.spec(name)
            if (projector := getattr(spec, "projector", None)) is not None:
                self._projectors[name] = _projector_flops(
                    projector.skeleton(), trainable.pop(), earlier.pop()
                )
            skeleton = spec.source.skeleton()
            self._flops[name] = module_flops(skeleton, trainable, earlier, causal)
            # With cached features, frozen leading blocks do not run.
            self._featured[name] = module_flops(
                skeleton, trainable, earlier, causal, node.frozen_blocks
            )
        self._tokens: dict[Any, tuple[int, int]] = {}
        self._pairs: dict[Any, int] = {}

    def of(self, meta: Sequence[MicrobatchMeta]) -> dict[str, float]:
        """Return the FLOPs of a step by module. Raises PlanError if the tokens per item of an
        encoder are unknown, or the model's mask needs places of items that a batch does not
        have."""
        total = dict.fromkeys(self._flops, 0.0)
        for microbatch in meta:
            for name, flops in self._of_microbatch(microbatch).items():
                total[name] += flops
        return total

    def _of_microbatch(self, meta: MicrobatchMeta) -> dict[str, float]:
        result = {}
        output_tokens: dict[str, int] = {}
        for name in self._model.encoder_names:
            items = len(meta.items.get(name, ()))
            if not items:
                continue
            tokens, output_tokens[name] = self._item_tokens(name, meta)
            flops = (self._featured if name in meta.featured else self._flops)[name]
            result[name] = items * (
                flops.per_token * tokens + flops.per_sample
                + sum(flops.per_pair.values() if flops.per_pair else ()) * tokens**2
            )
            if (projector := self._projectors.get(name)) is not None:
                result[name] += items * (
                    projector.per_token * output_tokens[name] + projector.per_sample
                )
        rows = self._rows(meta, output_tokens)
        flops = self._flops[self._model.text_module]
        result[self._model.text_module] = (
            flops.per_token * sum(length for length, _ in rows) + flops.per_sample * len(rows)
            + flops.per_label * meta.label_tokens
            + sum(
                pair_flops * self._row_pairs(length, spans, window)
                for window, pair_flops in (flops.per_pair or {}).items() for length, spans in rows
            )
        )
        return result

    def _item_tokens(self, name: str, meta: MicrobatchMeta) -> tuple[int, int]:
        """Return the tokens of an item in the encoder's blocks, and of its features."""
        shapes = {k: (1, *v[1:]) for k, v in meta.shapes[name].items() if k != "sample_index"}
        key = (name, tuple(shapes.items()))
        if key not in self._tokens:
            items = {
                field: torch.empty(
                    shape, dtype=getattr(torch, meta.dtypes[name][field].removeprefix("torch.")),
                    device="meta",
                )
                for field, shape in shapes.items()
            }
            tokens = encoder_tokens(self._model, name, items)
            if tokens is None:
                raise PlanError(f"encoder {name!r} does not say how many tokens an item has")
            self._tokens[key] = tokens
        return self._tokens[key]

    def _rows(
        self, meta: MicrobatchMeta, handed_on: Mapping[str, int]
    ) -> list[tuple[int, tuple[Span, ...]]]:
        """Return the length of every row of the language model, and its items if a mask depends on
        them."""
        masked = self._model.mask is not None
        if isinstance(self._model.merge, Prepend):
            rows = []
            for row, length in enumerate(meta.lengths):
                spans: list[Span] = []
                for kind, name in enumerate(self._model.encoder_names, start=1):
                    for _ in range(list(meta.items.get(name, ())).count(row)):
                        start = spans[-1].stop if spans else 0
                        spans.append(Span(start, start + handed_on[name], kind))
                rows.append((length + (spans[-1].stop if spans else 0), tuple(spans)))
            return rows
        if masked and any(meta.items.get(name) and name not in meta.places for name in handed_on):
            raise PlanError(
                "the model's mask needs the places of items in the text, which are unknown for "
                "batches in memory unless merge is \"prepend\""
            )
        return [
            (length, self._replaced(meta, handed_on, row) if masked else ())
            for row, length in enumerate(meta.lengths)
        ]

    def _replaced(
        self, meta: MicrobatchMeta, handed_on: Mapping[str, int], row: int
    ) -> tuple[Span, ...]:
        """Return the items of a row at their placeholders. An item that other tokens interrupt has
        several spans."""
        spans = []
        for kind, name in enumerate(self._model.encoder_names, start=1):
            tokens_left = handed_on.get(name, 0)
            for item_row, start, stop in meta.places.get(name, ()):
                while item_row == row and start < stop:
                    end = min(stop, start + tokens_left)
                    spans.append(Span(start, end, kind))
                    tokens_left -= end - start
                    tokens_left, start = tokens_left or handed_on[name], end
        return tuple(sorted(spans, key=lambda span: span.start))

    def _row_pairs(self, length: int, spans: tuple[Span, ...], window: int | None) -> int:
        if self._model.mask is None:
            visible = min(window or length, length)
            return visible * length - visible * (visible - 1) // 2
        key = (length, spans, window)
        if key not in self._pairs:
            if len(self._pairs) >= _MASKS_KEPT:
                self._pairs.clear()
            mask = self._model.mask(length, spans, document_lengths=[length])
            self._pairs[key] = (mask if window is None else mask.windowed(window)).area()
        return self._pairs[key]
