"""Rules that select the modules of a model to shard together.

They come from Hugging Face's plan for the model, or else from common names
(:mod:`raymm.actors.sharding.tensor_names`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from raymm.actors.sharding.tensor_names import FUSED, units_of_names
from raymm.actors.sharding.tensor_units import (
    KEY_VALUE_LEAVES,
    QUERY_LEAVES,
    Experts,
    Rules,
    Unit,
    head_name,
    is_linear,
    leaf_name,
    parent_name,
    widths,
)
from raymm.errors import ModelError


def find_rules(module: nn.Module) -> Rules:
    """Return Hugging Face's rules for a module, or rules by names.

    Raises:
        ModelError: Hugging Face's plan has an unsupported style.
    """
    plan = {k: v for k, v in (getattr(module, "_tp_plan", None) or {}).items() if v}
    rules = _rules_of_plan(module, plan)
    if any(unit.heads for unit in rules.units):
        return rules
    # Some plans only shard experts.
    used = {name for unit in rules.units for name in (*unit.columns, *unit.rows)}
    return replace(rules, units=rules.units + units_of_names(module, used))


def generic(name: str) -> str:
    """Replace the numbers of layers and experts in a name by ``*``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _rules_of_plan(module: nn.Module, plan: dict[str, str]) -> Rules:
    head = head_name(module)
    # Only modules with parameters in this part of the model.
    modules = {n: m for n, m in module.named_modules() if any(True for _ in m.parameters())}
    styles = {n: plan[generic(n)] for n in modules if generic(n) in plan and n != head}
    bare = {
        n: plan[generic(n)]
        for n, _ in module.named_parameters(remove_duplicate=False)
        if generic(n) in plan
    }
    experts = [n for n, style in styles.items() if style == "moe_tp_experts"]
    grouped: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        if style not in _PLAN_STYLES:
            raise ModelError(f"{name!r} has the style {style!r}")
        if style in _LINEAR_STYLES:
            if not is_linear(modules[name]):
                raise ModelError(f"{name!r}, a {type(modules[name]).__name__}, has {style!r}")
            grouped.setdefault(parent_name(name), {})[name] = style
    units = [
        unit
        for where, members in grouped.items()
        if (unit := _unit_of_plan(module, where, members, styles)) is not None
    ]
    return Rules(
        tuple(units),
        tuple(Experts(n, _expert_dims(n, bare)) for n in experts),
        tuple(
            n for n, style in bare.items() if style == "colwise" and parent_name(n) not in experts
        ),
    )


_LINEAR_STYLES = frozenset(
    {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input",
     "rowwise_rep"}
)
_PLAN_STYLES = _LINEAR_STYLES | {
    "embedding_rowwise",  # the vocabulary has separate rules
    "moe_tp_experts", "mla_kv_a_proj", "replicated_with_grad_allreduce", "replicate",
    "local_params",
}


def _unit_of_plan(
    module: nn.Module, where: str, members: dict[str, str], styles: dict[str, str]
) -> Unit | None:
    columns = tuple(n for n, style in members.items() if style.startswith("colwise"))
    rows = tuple(n for n, style in members.items() if style.startswith("rowwise"))
    gathered = {style for style in members.values() if style not in ("colwise", "rowwise")}
    heads = any(leaf_name(n) in QUERY_LEAVES | KEY_VALUE_LEAVES for n in columns)
    if not rows and not gathered:
        raise ModelError(f"{columns[0]!r} has 'colwise', but nothing in {where!r} has 'rowwise'")
    if not columns and not gathered:
        raise ModelError(f"{rows[0]!r} has 'rowwise', but nothing in {where!r} has 'colwise'")
    if gathered and not all(s not in ("colwise", "rowwise") for s in members.values()):
        raise ModelError(f"{where!r} mixes the styles {', '.join(sorted(set(members.values())))}")
    members_of_unit = [n for n in styles if n.startswith(where + ".")]
    partial = [n for n in members_of_unit if styles[n] == "replicated_with_grad_allreduce"]
    tails = {}
    for name in members_of_unit:
        if styles[name] == "mla_kv_a_proj":
            tails[name] = cast(Any, module.config).get_text_config().qk_rope_head_dim
    fused = _fused(module, columns, rows)
    return Unit(
        where, heads or fused == 3, columns, rows, bool(gathered), tuple(partial), tails, fused
    )


def _fused(module: nn.Module, columns: Sequence[str], rows: Sequence[str]) -> int:
    """Return the number of projections in the only column of a unit; 0 if it is not fused."""
    if len(columns) != 1 or len(rows) != 1:
        return 0
    if leaf_name(columns[0]) in FUSED[0]:
        return 3
    inner = widths(module.get_submodule(rows[0]))[0]
    out = widths(module.get_submodule(columns[0]))[1]
    return 2 if out == 2 * inner else 0


def _expert_dims(where: str, bare: dict[str, str]) -> dict[str, tuple[int, int]]:
    dims = {}
    for name, style in bare.items():
        if parent_name(name) == where:
            if style not in _EXPERT_STYLES:
                raise ModelError(f"{name!r} has the style {style!r}")
            dims[name] = _EXPERT_STYLES[style]
    return dims


# (dim, blocks) of (experts, out, in) matrices; transposed ones swap the names.
_EXPERT_STYLES = {
    "colwise": (1, 1), "packed_colwise": (1, 2), "rowwise": (2, 1), "packed_rowwise": (2, 2),
}
