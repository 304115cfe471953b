"""FLOPs of a training step of a whole model by module, without padding.

The language model has the tokens of the rows, including those that stand for items. The FLOPs of a
tower per token are counted once, from its structure and from products observed on the example. The
tokens of a microbatch follow from the size of the tower's largest input. A tower's tokens attend to
all tokens of their item. In blocks that were observed to attend to fewer tokens than others
(windows), they attend to as many tokens as on the example. A product counts once for the forward,
once if its weights are trained, and once if something before it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.weights.model_part import is_within
from raymm.costs.layer_count import count_products
from raymm.costs.load import Load
from raymm.costs.step_flops import ATTENTION_BACKWARD, ModuleFlops, activation_flops
from raymm.costs.workload import tower_load
from raymm.data import MicrobatchMeta
from raymm.errors import PlanError
from raymm.model.vlm import PretrainedVlm


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


class VlmStepFlops:
    """Counts the FLOPs of the steps of a whole model from its structure and its example. Raises
    PlanError if a layer cannot be counted."""

    def __init__(self, model: PretrainedVlm) -> None:
        self._flops: dict[str, ModuleFlops] = {}
        self._units: dict[str, _TowerUnit] = {}
        for name in model.tower_names:
            load = tower_load(model, name, model.example)
            if load is None:
                raise PlanError(f"tower {name!r} does not reach its blocks on the example")
            skeleton = model.tower_spec(name).source.skeleton()
            self._flops[name] = _step_flops(skeleton, False, False, load)
            self._units[name] = _unit(model, name, load)
        self._language_model = model.text_module
        self._flops[self._language_model] = _step_flops(
            model.language_spec().source.skeleton(), True,
            any(model.trained[name] for name in model.tower_names),
        )

    def of(self, meta: Sequence[MicrobatchMeta]) -> dict[str, float]:
        """Return the FLOPs of a step by module, from the metadata of its microbatches."""
        total = dict.fromkeys(self._flops, 0.0)
        for microbatch in meta:
            for name in self._units:
                if (shapes := microbatch.shapes.get(name)) and name not in microbatch.featured:
                    total[name] += self._tower(name, shapes, len(microbatch.items.get(name, ())))
            total[self._language_model] += self._language(microbatch)
        return total

    def _tower(self, name: str, shapes: Mapping[str, tuple[int, ...]], items: int) -> float:
        unit, flops = self._units[name], self._flops[name]
        tokens = unit.tokens * math.prod(shapes.get(unit.entry, (0,)))
        rows = max(items, 1) if unit.row_tokens is None else tokens / unit.row_tokens
        pairs = rows * (tokens / rows) ** 2 if rows else 0.0
        return (
            flops.per_token * tokens + flops.per_sample * rows
            + sum((flops.per_pair or {}).values()) * pairs
        )

    def _language(self, meta: MicrobatchMeta) -> float:
        flops = self._flops[self._language_model]
        pairs = sum(
            pair_flops * sum(visible_pairs(length, window) for length in meta.lengths)
            for window, pair_flops in (flops.per_pair or {}).items()
        )
        return (
            flops.per_token * sum(meta.lengths) + flops.per_sample * len(meta.lengths)
            + flops.per_label * meta.label_tokens + pairs
        )


def _step_flops(
    module: nn.Module, causal: bool, earlier: bool, example: Load | None = None
) -> ModuleFlops:
    """Count a training step of a module, whose submodules run in the order of registration.
    ``earlier`` is True if something is trained before the module; ``example`` is its load on the
    example."""
    example_places = () if example is None else example.places
    attention = () if example is None else example.attention
    most_pairs = max((sizes.pairs for _, sizes in attention), default=0.0)

    def products(samples: int, tokens: int, labels: int) -> dict[str, tuple[float, float]]:
        return count_products(module, Load(samples, tokens, labels, example_places), causal)

    # One token of one sample, two tokens of one sample, and one token with a label, since counts
    # are linear.
    single, double, label = products(1, 1, 0), products(1, 2, 0), products(1, 1, 1)
    total, onward = ModuleFlops(), earlier
    onward_at: dict[str, bool] = {}
    for name, child in module.named_modules():
        trained = any(
            p is not None and p.requires_grad for p in child._parameters.values()
        )  # fmt: skip
        if name in single:
            times = 1.0 + onward + trained
            (a, base), (b, base_two), (c, _) = single[name], double[name], label[name]
            frozen = float(trained)  # weights under adapters are not trained
            total += ModuleFlops(
                (b - a) * times - (base_two - base) * frozen,
                (2 * a - b) * times - (2 * base - base_two) * frozen, (c - a) * times,
            )
        onward = onward or trained
        onward_at[name] = onward
    path = find_blocks(module)
    for index, block_flops in enumerate(activation_flops(module, causal, example)):
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


def _unit(model: PretrainedVlm, name: str, load: Load) -> _TowerUnit:
    tower = model.tower(name)
    sizes: dict[str, int] = {
        argument: model.example[entry].numel()
        for argument, entry in tower.arguments if entry in model.example
    }
    largest = max(sizes, key=lambda argument: sizes[argument])
    row_tokens = None if load.samples == 1 else load.tokens
    return _TowerUnit(largest, load.total / sizes[largest], row_tokens)


def visible_pairs(length: int, window: int | None) -> int:
    """Return the visible pairs of a query and a key in a causal row of ``length`` tokens.
    ``window`` is the number of keys that a query sees, itself included; None for all."""
    visible = min(window or length, length)
    return visible * length - visible * (visible - 1) // 2
