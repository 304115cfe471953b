"""Features and heads of a process in a sharded module, for slicing random numbers.

They follow from a row's weight, because a fused column has several blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from raymm.actors.sharding.tensor_heads import local_query_heads
from raymm.actors.sharding.tensor_plan import (
    COLUMN,
    EXPERTS,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    TensorPlan,
)
from raymm.actors.sharding.tensor_units import widths
from raymm.kernels.shared_draws import Cut, Features, set_features


def cut_draws(module: nn.Module, plan: TensorPlan, rank: int, inner: Mapping[str, int]) -> None:
    """Add hooks that select features for slicing the random numbers of a sharded module.

    ``inner`` has the number of inputs of each row over all processes.
    """
    names = [name for name, _ in module.named_modules() if name in plan.styles]
    order = {name: number for number, name in enumerate(names)}
    rows = [name for name in names if name in inner]
    head = None if plan.head is None else plan.head.removesuffix(".weight")
    for name in names:
        child, style = module.get_submodule(name), plan.styles[name]
        if style == EXPERTS:
            _around(child, Features(None), None)
        elif name in inner:
            _around(child, _features(plan, name, rank, inner[name]), None)
        elif style in (COLUMN, GATHERED_COLUMN):
            keeps_all = style == GATHERED_COLUMN or name == head
            row = None if keeps_all else _row_of(name, order, rows)
            features = None if row is None else _features(plan, row, rank, inner[row])
            _around(child, None, features)


def row_widths(module: nn.Module, plan: TensorPlan) -> dict[str, int]:
    """Return the number of inputs of each row of a plan, before the module is sharded."""
    present = dict(module.named_modules())
    return {
        name: widths(present[name])[0] for name, style in plan.styles.items()
        if style in (ROW, SPLIT_ROW) and isinstance(present.get(name), nn.Module)
        and present[name]._parameters.get("weight") is not None
    }


def _features(plan: TensorPlan, row: str, rank: int, inner: int) -> Features:
    ranges = plan.shards[f"{row}.weight"][rank].ranges
    cut = Cut(sum(stop - start for start, stop in ranges), inner, tuple(ranges))
    return Features(cut, _heads(plan, row, cut))


def _heads(plan: TensorPlan, row: str, cut: Cut) -> int | None:
    """Return the local number of heads of a row's attention; None if unknown or not an attention.
    """
    units = [where for where in plan.attributes if row.startswith(f"{where}.")]
    heads = local_query_heads(plan.attributes[max(units, key=len)]) if units else None
    return heads if heads is not None and cut.grouped(heads) is not None else None


def _row_of(column: str, order: Mapping[str, int], rows: Sequence[str]) -> str | None:
    """Return the row that takes a column's outputs: the next one with the longest common prefix."""
    def rank(row: str) -> tuple[int, bool, int]:
        shared = 0
        for a, b in zip(column.split("."), row.split("."), strict=False):
            if a != b:
                break
            shared += 1
        distance = order[row] - order[column]
        return shared, distance > 0, -abs(distance)

    return max(rows, key=rank, default=None)


def _around(child: nn.Module, inside: Features | None, after: Features | None) -> None:
    def enter(*_: Any) -> None:
        set_features(inside)

    def leave(*_: Any) -> None:
        set_features(after)

    child.register_forward_pre_hook(enter)
    child.register_forward_hook(leave)
