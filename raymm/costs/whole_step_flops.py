"""FLOPs of a training step of a model that runs as a whole, per module, without padding.

The language model has the tokens of the rows, with those that stand for items. What a tower does
per token of its blocks is counted once, from its structure and from how often its products were
seen to run on the example; how many tokens a microbatch has follows from the size of the tower's
largest input. A tower's tokens attend to all of their item. In blocks that were seen to attend to
fewer tokens than other blocks do (windows), they attend to as many tokens as on the example. A
product counts once for the forward, once more where its weights are trained, and once more where
something before it is.
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
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import WholeModel


@dataclass(frozen=True)
class _TowerUnit:
    """How many tokens a tower's blocks have of its largest input.

    Attributes:
        entry: argument of the tower that the input is.
        tokens: per element of it.
        row_tokens: tokens that attend to each other, where the blocks have rows of their own; None
            where all tokens are in one row, and those of an item attend to each other.
    """

    entry: str
    tokens: float
    row_tokens: int | None


class WholeStepFlops:
    """Counts the steps of a run of a whole model.

    Args:
        model: the description; only its structure and its example are used.

    Raises:
        PlanError: layers that cannot be counted.
    """

    def __init__(self, model: WholeModel) -> None:
        self._flops: dict[str, ModuleFlops] = {}
        self._units: dict[str, _TowerUnit] = {}
        for name in model.tower_names:
            load = tower_load(model, name, model.example)
            if load is None:
                raise PlanError(f"tower {name!r} does not reach its blocks on the example")
            skeleton = model.tower_spec(name).source.skeleton()
            self._flops[name] = _step_flops(skeleton, False, False, load)
            self._units[name] = _unit(model, name, load)
        self._flops[LANGUAGE_MODEL] = _step_flops(
            model.language_spec().source.skeleton(), True,
            any(model.trained[name] for name in model.tower_names),
        )

    def of(self, meta: Sequence[MicrobatchMeta]) -> dict[str, float]:
        """Return the FLOPs of a step by module.

        Args:
            meta: of its microbatches.
        """
        total = dict.fromkeys(self._flops, 0.0)
        for microbatch in meta:
            for name in self._units:
                if (shapes := microbatch.shapes.get(name)) and name not in microbatch.featured:
                    total[name] += self._tower(name, shapes, len(microbatch.items.get(name, ())))
            total[LANGUAGE_MODEL] += self._language(microbatch)
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
        flops = self._flops[LANGUAGE_MODEL]
        pairs = sum(
            each * sum(visible_pairs(length, window) for length in meta.lengths)
            for window, each in (flops.per_pair or {}).items()
        )
        return (
            flops.per_token * sum(meta.lengths) + flops.per_sample * len(meta.lengths)
            + flops.per_label * meta.label_tokens + pairs
        )


def _step_flops(
    module: nn.Module, causal: bool, earlier: bool, example: Load | None = None
) -> ModuleFlops:
    """Count a training step of a module, whose submodules run in the order of registration.

    Args:
        module: a skeleton, frozen as it is trained.
        causal: True for a language model.
        earlier: True if something is trained before the module.
        example: what the module was seen to do on the example.
    """
    places = () if example is None else example.places
    seen = () if example is None else example.attention
    most_pairs = max((sizes.pairs for _, sizes in seen), default=0.0)

    def products(samples: int, tokens: int, labels: int) -> dict[str, tuple[float, float]]:
        return count_products(module, Load(samples, tokens, labels, places), causal)

    # A token of one sample, two of one, and one whose label counts: counts are linear in these.
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
    for index, of_block in enumerate(activation_flops(module, causal, example)):
        block = f"{path}.{index}"
        inside = [flag for name, flag in onward_at.items() if is_within(name, (block,))]
        backward = any(inside) if inside else onward
        windowed = sum(
            sizes.pairs * 2.0 * (sizes.query + sizes.out) for name, sizes in seen
            if is_within(name, (block,)) and sizes.pairs < most_pairs
        )
        if windowed:
            of_block = ModuleFlops(of_block.per_token + windowed)
        total += of_block * (1 + ATTENTION_BACKWARD * backward)
    return total


def _unit(model: WholeModel, name: str, load: Load) -> _TowerUnit:
    tower = model.tower(name)
    sizes: dict[str, int] = {
        argument: model.example[entry].numel()
        for argument, entry in tower.arguments if entry in model.example
    }
    largest = max(sizes, key=lambda argument: sizes[argument])
    row_tokens = None if load.samples == 1 else load.tokens
    return _TowerUnit(largest, load.total / sizes[largest], row_tokens)


def visible_pairs(length: int, window: int | None) -> int:
    """Count the pairs of a query and a key of a row of text, each of which sees what is before it.

    Args:
        length: tokens of the row.
        window: keys that a query sees, itself included; None for all.
    """
    seen = min(window or length, length)
    return seen * length - seen * (seen - 1) // 2
