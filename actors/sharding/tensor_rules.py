"""Rules that select the modules of a model to shard together.

They come from Hugging Face's plan for the model, or else from common names. A unit found by names
needs both halves with matching widths; all other modules are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import HIGH, LOW, MAGNITUDE, AdaptedLayer
from raymm.actors.adapters.quantised import GROUP, PACKED, SCALE
from raymm.errors import ModelError

QUERY_LEAVES = frozenset(
    {"q_proj", "query", "q", "to_q", "wq", "q_lin", "query_proj", "q_b_proj", "q_up_proj"}
)
KEY_VALUE_LEAVES = frozenset(
    {"k_proj", "v_proj", "key", "value", "k", "v", "to_k", "to_v", "wk", "wv", "k_lin", "v_lin",
     "key_proj", "value_proj"}
)

Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class ParameterShard:
    """Part of a parameter that a process holds: ranges [start, stop) along ``dim``, in order.

    A parameter with several matrices (fused gate and up) has several ranges.
    """

    dim: int
    ranges: Ranges

    @property
    def length(self) -> int:
        """Length of the shard along its dim."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Unit:
    """Modules that are sharded together: ``columns`` by outputs, ``rows`` by inputs.

    Attributes:
        where: name of the module with the head counts, for attention; else of the module around the
            unit.
        heads: True if shards consist of heads.
        gathered: True to gather outputs of columns and split inputs of rows, so that every process
            computes all operations in between.
        partial: names of modules between columns and rows whose gradients are those of the local
            heads.
        tails: per module that bypasses columns (the rotary part of multi-head latent attention),
            how many of its last outputs go to heads directly.
        fused: number of projections in one column (gate and up: 2; query, key and value: 3). Such a
            unit is gathered unless their layout is known.
    """

    where: str
    heads: bool
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    gathered: bool = False
    partial: tuple[str, ...] = ()
    tails: dict[str, int] = field(default_factory=dict)
    fused: int = 0


@dataclass(frozen=True)
class Experts:
    """Module whose 3-D parameters are matrices of all experts, as in Hugging Face models.

    ``dims`` has (split dim, number of blocks along it) by parameter name (gate and up: 2 blocks).
    """

    where: str
    dims: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Rules:
    """Modules to shard; ``parameters`` are bare ones that are split by heads along dim 0."""

    units: tuple[Unit, ...] = ()
    experts: tuple[Experts, ...] = ()
    parameters: tuple[str, ...] = ()


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear | Conv1D]:
    """Return True for exactly ``nn.Linear`` or ``Conv1D``, or these with an adapter, and a real
    weight."""
    kinds = type(module) in (nn.Linear, Conv1D) or isinstance(module, AdaptedLayer)
    return kinds and "weight" in cast(nn.Module, module)._parameters


def widths(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear module."""
    if isinstance(module, AdaptedLayer):
        return module.widths[1], module.widths[0]
    rows, columns = cast(nn.Linear | Conv1D, module).weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def split(
    layer: AdaptedLayer, by_output: bool, ranges: Sequence[Ranges]
) -> dict[str, tuple[ParameterShard, ...]]:
    """Return the shards of a layer's adapter and quantised weight, by name, from ranges per
    process.

    ``by_output`` is True if the ranges split the layer's outputs, False for its inputs.

    Raises:
        ValueError: the split separates inputs that share a scale.
    """
    def shards(dim: int, size: int = 1) -> tuple[ParameterShard, ...]:
        if any(edge % size for local in ranges for bounds in local for edge in bounds):
            raise ValueError(f"a split between {size} inputs that share a scale")
        return tuple(
            ParameterShard(dim, tuple((lo // size, hi // size) for lo, hi in local))
            for local in ranges
        )

    if by_output:
        return {name: shards(0) for name in (HIGH, MAGNITUDE, SCALE)}
    if not layer.packed:
        return {LOW: shards(1)}
    input_dim = int(not isinstance(layer, Conv1D))
    return {LOW: shards(1), SCALE: shards(1, GROUP), "weight": shards(input_dim, PACKED)}


def leaf_name(name: str) -> str:
    """Return the part of a name after the last dot."""
    return name.rpartition(".")[2]


def parent_name(name: str) -> str:
    """Return the part of a name before the last dot, or an empty string."""
    return name.rpartition(".")[0]


def head_name(module: nn.Module) -> str | None:
    """Return the name of the module that computes logits."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        head = get() if get else None
    except (NotImplementedError, AttributeError):
        head = None
    names = (name for name, child in module.named_modules() if child is head)
    return None if head is None else next(names, None)


def output_head(module: nn.Module) -> str | None:
    """Return the name of the linear module that computes logits; None if there is none."""
    name = head_name(module)
    return name if name is not None and is_linear(module.get_submodule(name)) else None


def is_query(name: str) -> bool:
    """Return True if a column's name is that of a query projection."""
    return leaf_name(name) in QUERY_LEAVES


def is_key_or_value(name: str) -> bool:
    """Return True if a column's name is that of a key or value projection."""
    return leaf_name(name) in KEY_VALUE_LEAVES


# Per kind of unit: the columns, then possible names of their row, relative to the module around
# both. A star matches any one name.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"),
     ("o_proj", "out_proj", "dense", "proj", "projection_layer", "c_proj", "to_out.0", "wo")),
    (("query", "key", "value"), ("output", "out", "proj", "dense", "o_proj", "out_proj")),
    (("query_proj", "key_proj", "value_proj"), ("output", "out_proj", "o_proj")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("output.dense",)),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("q", "k", "v"), ("o", "proj", "out", "out_proj")),
    (("wq", "wk", "wv"), ("wo", "out_proj")),
    (("to_q", "to_k", "to_v"), ("to_out", "to_out.0")),
)
FUSED = (
    ("qkv_proj", "qkv", "query_key_value", "c_attn", "Wqkv", "in_proj", "att_proj", "wqkv"),
    ("o_proj", "out_proj", "c_proj", "dense", "proj", "projection", "Wo", "attn_out", "wo"),
)
_GATED = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("c_fc_0", "c_fc_1"), ("c_proj",)),
    (("fc1_g", "fc1_x"), ("fc2",)),
    (("w1", "v1"), ("w2",)),
    (("linear_1", "linear_v"), ("linear_out",)),
)
_FEED_FORWARD = (
    (("fc1", "fc_1"), ("fc2", "fc_2")),
    (("c_fc",), ("c_proj",)),
    (("lin1", "linear1", "linear_1"), ("lin2", "linear2", "linear_2")),
    (("fc_in",), ("fc_out",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
    (("up_proj",), ("down_proj",)),
    (("wi",), ("wo",)),
    (("w1",), ("w2",)),
    (("intermediate_dense",), ("output_dense",)),
    (("gate_up_proj", "weights_in", "wi_fused", "Wi"), ("down_proj", "weights_out", "wo", "Wo")),
    (("intermediate.dense",), ("output.dense",)),
)
_LOCAL_NORMS = frozenset(
    {"q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm",
     "query_layernorm", "key_layernorm"}
)


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
    return replace(rules, units=rules.units + _units_of_names(module, used))


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


def _units_of_names(module: nn.Module, taken: set[str]) -> tuple[Unit, ...]:
    """Return attention and feed-forward units, found by names, of layers that are not ``taken``."""
    units: list[Unit] = []
    taken = {*taken, head_name(module) or ""}
    for path, parent in module.named_modules():
        for unit in (*_attention_units(path, parent), *_feed_forward_units(path, parent)):
            members = {*unit.columns, *unit.rows}
            if not members & taken:
                taken |= members
                units.append(unit)
    return tuple(units)


def _attention_units(where: str, parent: nn.Module) -> Iterable[Unit]:
    for names, rows in _ATTENTION:
        columns = _linear_children(parent, names)
        row = _first(parent, rows)
        if row is None or columns is None:
            continue
        # Values may have another width than keys, but a row's inputs match the outputs of all
        # heads.
        query, key, _ = (widths(column)[1] for column in columns)
        if widths(row[1])[0] % key == 0 and query % key == 0:
            container = ".".join(names[0].split(".")[:-1])
            container = _join(where, container)
            norms = _local_norms(
                container, parent.get_submodule(".".join(names[0].split(".")[:-1]))
            )
            yield Unit(
                container, True, tuple(_join(where, n) for n in names), (_join(where, row[0]),),
                partial=norms,
            )
    if (latent := _latent_unit(where, parent)) is not None:
        yield latent
    column, row = _first(parent, FUSED[0]), _first(parent, FUSED[1])
    if column and row and widths(column[1])[1] > widths(row[1])[0]:
        yield Unit(
            where, True, (_join(where, column[0]),), (_join(where, row[0]),), gathered=True,
            fused=3,
        )


def _latent_unit(where: str, parent: nn.Module) -> Unit | None:
    """Return the unit of multi-head latent attention (DeepSeek-V2 §2.1); heads share rotary keys.
    """
    query, row = _first(parent, ("q_b_proj", "q_proj")), _first(parent, ("o_proj", "out_proj"))
    latent, key_value = _child(parent, "kv_a_proj_with_mqa"), _child(parent, "kv_b_proj")
    rotary = getattr(parent, "qk_rope_head_dim", None)
    if query is None or row is None or not is_linear(key_value) or latent is None or not rotary:
        return None
    columns = (_join(where, query[0]), _join(where, "kv_b_proj"))
    tails = {_join(where, "kv_a_proj_with_mqa"): rotary}
    return Unit(where, True, columns, (_join(where, row[0]),), tails=tails)


def _local_norms(where: str, container: nn.Module) -> tuple[str, ...]:
    return tuple(
        _join(where, name) for name, _ in container.named_children() if name in _LOCAL_NORMS
    )


def _feed_forward_units(where: str, parent: nn.Module) -> Iterable[Unit]:
    for names, rows in _GATED:
        columns = _linear_children(parent, names)
        row = _first(parent, rows)
        if row and columns is not None:
            if all(widths(column)[1] == widths(row[1])[0] for column in columns):
                yield _feed_forward(where, names, row[0])
    for names, rows in _FEED_FORWARD:
        column, row = _first(parent, names), _first(parent, rows)
        if column is None or row is None:
            continue
        inner, out = widths(row[1])[0], widths(column[1])[1]
        if out == inner and widths(column[1])[0] == widths(row[1])[1]:
            yield _feed_forward(where, (column[0],), row[0])
        elif out == 2 * inner:
            yield Unit(
                where, False, (_join(where, column[0]),), (_join(where, row[0]),), gathered=True,
                fused=2,
            )


def _feed_forward(where: str, columns: Sequence[str], row: str) -> Unit:
    return Unit(where, False, tuple(_join(where, n) for n in columns), (_join(where, row),))


def _join(where: str, name: str) -> str:
    return ".".join(segment for segment in (where, name) if segment)


def _child(parent: nn.Module, name: str) -> nn.Module | None:
    module: nn.Module | None = parent
    for segment in name.split("."):
        module = None if module is None else module._modules.get(segment)
    return module


def _linear_children(parent: nn.Module, names: Sequence[str]) -> Sequence[nn.Module] | None:
    """Return all named children; None if one is missing or is not linear."""
    children = [child for name in names if is_linear(child := _child(parent, name))]
    return children if len(children) == len(names) else None


def _first(parent: nn.Module, names: Sequence[str]) -> tuple[str, nn.Module] | None:
    for name in names:
        child = _child(parent, name)
        if is_linear(child):
            return name, child
    return None
