"""Exact FLOPs of a training step with its real lengths, items and masks, without padding.

Only necessary work counts (PaLM, appendix B), not recomputation, masked pairs or padding. A product
with a weight counts once for the forward, once if gradients are passed to an earlier layer, and
once if the weight is trained. Every product of two activations (attention, scans, linear attention)
counts twice in the backward. Counts per token, sample, label and visible pair come from
:mod:`raymm.costs.layer_count`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.blocks import find_blocks, num_blocks
from raymm.actors.modules.merge import Prepend
from raymm.actors.weights.model_part import is_within
from raymm.costs.forward_run import MOST_TOKENS, forward_run
from raymm.costs.layer_count import count_activations, count_products
from raymm.costs.load import Load
from raymm.costs.workload import encoder_tokens, tower_load
from raymm.data import MicrobatchMeta
from raymm.errors import PlanError
from raymm.kernels.mask.spans import Span
from raymm.model.features import FLOPS
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
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
    module: nn.Module, causal: bool = False, earlier: bool = False, load: Load | None = None,
    first: int = 0,
) -> ModuleFlops:  # fmt: skip
    """Return the FLOPs of one module in a training step. Its submodules run in the order of
    registration.

    Args:
        module: a skeleton; parameters may be on the meta device.
        earlier: True if something is trained before the module.
        load: observed load whose rows of products and attention are used.
        first: first block that runs; nothing before it does.
    """
    places = () if load is None else load.places
    attention = () if load is None else load.attention
    path = find_blocks(module)
    blocks = num_blocks(module)
    if first >= blocks:
        return ModuleFlops()

    def products(samples: int, tokens: int, labels: int) -> dict[str, tuple[float, float]]:
        return count_products(module, Load(samples, tokens, labels, places), causal)

    # One token of one sample, two tokens of one sample, and one token with a label, since counts
    # are linear.
    single, double, label = products(1, 1, 0), products(1, 2, 0), products(1, 1, 1)
    total, onward, runs = ModuleFlops(), earlier, first == 0
    onward_at: dict[str, bool] = {}
    for name, child in module.named_modules():
        runs = runs or name == f"{path}.{first}"
        trained = any(p is not None and p.requires_grad for p in child._parameters.values())
        if runs and name in single:
            times = 1.0 + onward + trained
            (a, base), (b, base_two), (c, _) = single[name], double[name], label[name]
            frozen = float(trained)  # weights under adapters are not trained
            total += ModuleFlops(
                (b - a) * times - (base_two - base) * frozen,
                (2 * a - b) * times - (2 * base - base_two) * frozen, (c - a) * times,
            )
        onward = onward or trained
        onward_at[name] = onward
    most_pairs = max((sizes.pairs for _, sizes in attention), default=0.0)
    for index, block_flops in enumerate(_activations(module, causal, load)):
        if index < first:
            continue
        block = f"{path}.{index}"
        block_flags = [flag for name, flag in onward_at.items() if is_within(name, (block,))]
        backward = any(block_flags) if block_flags else onward
        windowed = sum(
            sizes.pairs * 2.0 * (sizes.query + sizes.out) for name, sizes in attention
            if is_within(name, (block,)) and sizes.pairs < most_pairs
        )
        if windowed:
            block_flops = ModuleFlops(block_flops.per_token + windowed)
        total += block_flops * (1 + ATTENTION_BACKWARD * backward)
    return total


def _activations(module: nn.Module, causal: bool, load: Load | None) -> list[ModuleFlops]:
    """Return FLOPs of products of two activations in a forward, by block: attention per pair, other
    products per token of ``load``. By default, a language model runs on a sample whose length is a
    multiple of the chunks of linear attention."""
    run = None
    if causal or load is not None:
        load = load or Load(1, MOST_TOKENS // 4)
        run = forward_run(module, load, "bf16", causal)
    tokens = 1 if load is None else load.total
    return [
        ModuleFlops(mixing / tokens, per_pair=pairs)
        for mixing, pairs in count_activations(module, causal, run)
    ]


class _StepFlops(ABC):
    """Counts the FLOPs of a run's steps. Raises PlanError if a layer cannot be counted."""

    _flops: dict[str, ModuleFlops]
    _projectors: Mapping[str, ModuleFlops]
    _text: str

    def of(self, meta: Sequence[MicrobatchMeta]) -> dict[str, float]:
        """Return the FLOPs of a step by module. Raises PlanError if the tokens per item of an
        encoder are unknown, or the model's mask needs places of items that a batch does not
        have."""
        total = dict.fromkeys(self._flops, 0.0)
        for microbatch in meta:
            for name, flops in self._of_microbatch(microbatch).items():
                total[name] += flops
        return total

    def of_loads(self, loads: Mapping[str, Load]) -> float:
        """Return the FLOPs of a microbatch with these loads of all modules. Rows of the language
        model are causal, without the model's mask."""
        total = 0.0
        for name, flops in self._flops.items():
            load, causal = loads[name], name == self._text
            labels = load.total if load.labels is None else load.labels
            pairs = sum(
                pair_flops * (visible_pairs(load.tokens, window) if causal else load.tokens**2)
                for window, pair_flops in (flops.per_pair or {}).items()
            )
            total += flops.per_token * load.total + flops.per_label * labels
            total += load.samples * (flops.per_sample + pairs)
            if (projector := self._projectors.get(name)) is not None:
                total += projector.per_token * load.of_projector().total
                total += projector.per_sample * load.samples
        return total

    @abstractmethod
    def _of_microbatch(self, meta: MicrobatchMeta) -> dict[str, float]:
        """Return the FLOPs of one microbatch by module."""

    @abstractmethod
    def tokens(self, meta: MicrobatchMeta) -> dict[str, float]:
        """Return the tokens of a microbatch by module, in the encoders' blocks and in the rows of
        the language model, with their padding; raise as :meth:`of`."""


class StepFlops(_StepFlops):
    """FLOPs of the steps of a model of parts, from its structure."""

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model
        graph = model.graph
        trained_before = trainable_before(graph)
        self._flops: dict[str, ModuleFlops] = {}
        self._featured: dict[str, ModuleFlops] = {}
        self._text = model.text_module
        self._projectors: dict[str, ModuleFlops] = {}
        for node in graph.nodes:
            name, earlier = node.name, trained_before[node.name]
            spec = model.spec(name)
            if (projector := getattr(spec, "projector", None)) is not None:
                self._projectors[name] = module_flops(projector.skeleton(), earlier=earlier[-1])
            skeleton, causal = spec.source.skeleton(), name == model.text_module
            every = self._flops[name] = module_flops(skeleton, causal, earlier[0])
            # With cached features, frozen leading blocks do not run.
            self._featured[name] = every if not (first := node.frozen_blocks) else module_flops(
                skeleton, causal, earlier[0], first=first
            )
        self._tokens: dict[Any, tuple[int, int]] = {}
        self._pairs: dict[Any, int] = {}

    def tokens(self, meta: MicrobatchMeta) -> dict[str, float]:
        result: dict[str, float] = {}
        output_tokens: dict[str, int] = {}
        for name in self._model.encoder_names:
            if items := len(meta.items.get(name, ())):
                tokens, output_tokens[name] = self._item_tokens(name, meta)
                result[name] = items * tokens
        lengths = [length for length, _ in self._rows(meta, output_tokens)]
        text = _with_padding(lengths, self._model.packing)
        return {**result, self._model.text_module: text}

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


@dataclass(frozen=True)
class _TowerUnit:
    """Tokens of a tower's blocks relative to its largest input.

    Attributes:
        entry: argument of the tower for that input.
        tokens: tokens per element of the input.
        row_tokens: tokens that attend to each other, if the blocks have separate rows; None if all
            tokens are in one row, where those of an item attend to each other.
    """

    entry: str
    tokens: float
    row_tokens: int | None


class VlmStepFlops(_StepFlops):
    """FLOPs of the steps of a Hugging Face VLM, from its structure and its example."""

    def __init__(self, model: PretrainedVlm) -> None:
        self._flops: dict[str, ModuleFlops] = {}
        self._units: dict[str, _TowerUnit] = {}
        for name in model.tower_names:
            load = tower_load(model, name, model.example)
            if load is None:
                raise PlanError(f"tower {name!r} does not reach its blocks on the example")
            skeleton = model.tower_spec(name).source.skeleton()
            self._flops[name] = module_flops(skeleton, load=load)
            self._units[name] = _unit(model, name, load)
        self._text, self._packed, self._projectors = model.text_module, model.packing, {}
        self._flops[self._text] = module_flops(
            model.language_spec().source.skeleton(), True,
            any(model.trained[name] for name in model.tower_names),
        )

    def _of_microbatch(self, meta: MicrobatchMeta) -> dict[str, float]:
        result = {self._text: self._language(meta)}
        for name in self._units:
            if (shapes := meta.shapes.get(name)) and name not in meta.featured:
                result[name] = self._tower(name, shapes, len(meta.items.get(name, ())))
        return result

    def tokens(self, meta: MicrobatchMeta) -> dict[str, float]:
        towers = {
            name: self._tower_tokens(name, meta.shapes[name])
            for name in self._units if meta.shapes.get(name)
        }
        text = _with_padding(meta.lengths, self._packed)
        return {**towers, self._text: text}

    def _tower_tokens(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
        unit = self._units[name]
        return unit.tokens * math.prod(shapes.get(unit.entry, (0,)))

    def _tower(self, name: str, shapes: Mapping[str, tuple[int, ...]], items: int) -> float:
        unit, flops = self._units[name], self._flops[name]
        tokens = self._tower_tokens(name, shapes)
        rows = max(items, 1) if unit.row_tokens is None else tokens / unit.row_tokens
        pairs = rows * (tokens / rows) ** 2 if rows else 0.0
        return (
            flops.per_token * tokens + flops.per_sample * rows
            + sum((flops.per_pair or {}).values()) * pairs
        )

    def _language(self, meta: MicrobatchMeta) -> float:
        flops = self._flops[self._text]
        pairs = sum(
            pair_flops * sum(visible_pairs(length, window) for length in meta.lengths)
            for window, pair_flops in (flops.per_pair or {}).items()
        )
        return (
            flops.per_token * sum(meta.lengths) + flops.per_sample * len(meta.lengths)
            + flops.per_label * meta.label_tokens + pairs
        )


def _unit(model: PretrainedVlm, name: str, load: Load) -> _TowerUnit:
    tower = model.tower(name)
    sizes: dict[str, int] = {
        argument: model.example[entry].numel()
        for argument, entry in tower.arguments if entry in model.example
    }
    largest = max(sizes, key=lambda argument: sizes[argument])
    row_tokens = None if load.samples == 1 else load.tokens
    return _TowerUnit(largest, load.total / sizes[largest], row_tokens)


def _with_padding(lengths: Sequence[int], packed: bool) -> int:
    """Return the tokens of rows, which are padded to the longest unless they are packed."""
    return sum(lengths) if packed else max(lengths, default=0) * len(lengths)


def visible_pairs(length: int, window: int | None) -> int:
    """Return the visible pairs of a query and a key in a causal row of ``length`` tokens.
    ``window`` is the number of keys that a query sees, itself included; None for all."""
    visible = min(window or length, length)
    return visible * length - visible * (visible - 1) // 2


@singledispatch
def count_flops(model: Model) -> StepFlops | VlmStepFlops:
    """Return a counter of the FLOPs of a model's steps; raise PlanError or ModelError if they
    cannot be counted."""
    model.require(FLOPS)
    raise TypeError(f"the FLOPs of {type(model).__name__} are not counted")


count_flops.register(MultimodalModule, StepFlops)
count_flops.register(PretrainedVlm, VlmStepFlops)
