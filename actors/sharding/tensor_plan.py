"""Tensor-parallel plan of a module, applied by :mod:`raymm.actors.sharding.tensor_shard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import HIGH, LOW, AdaptedLayer
from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.projector import Projector
from raymm.actors.sharding.tensor_rules import (
    Experts,
    ParameterShard,
    Range,
    Ranges,
    Rules,
    Unit,
    find_rules,
    generic,
    is_key_or_value,
    is_query,
    output_head,
    split,
    widths,
)
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ModelError, PlanError

COLUMN, ROW = "column", "row"
GATHERED_COLUMN, SPLIT_ROW = "gathered_column", "split_row"
EMBEDDING, EXPERTS = "embedding", "experts"
_QUERY_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "num_query_heads",
    "head_num", "heads", "nhead", "n_local_heads",
)
_KEY_COUNTS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_k_heads", "num_v_heads",
    "num_heads_kv", "n_local_kv_heads",
)
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep", "kv_groups", "num_groups")
_SIZES = (
    "embed_dim", "all_head_size", "hidden_size", "inner_dim", "split_size", "attention_size",
    "q_size", "proj_dim", "dim", "d_model", "projection_size", "q_dim",
)
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "d_kv",
              "key_value_proj_dim")
_CONFIG_HEADS = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
)
CONFIG = "config."
"""Prefix of attribute names that belong to the config, as seen by one module."""


@dataclass(frozen=True)
class TensorPlan:
    """Description of how a module is sharded over ``tp`` processes; names are relative to the
    module.

    Attributes:
        styles: style of each sharded module; see ``tensor_shard``.
        attributes: per attention module, the attributes that depend on the number of heads.
        tails: per module, how many of its last outputs go to the local heads directly.
        shards: per sharded parameter, the shard of every process.
        partial: replicated parameters with a partial gradient on every process.
        head: the parameter whose rows are the logits' columns, if it is sharded.
    """

    tp: int
    styles: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tails: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, tuple[ParameterShard, ...]] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    head: str | None = None

    def shard(self, parameter: str, rank: int) -> ParameterShard | None:
        """Return a process's shard of a parameter; None if it holds the full parameter."""
        shards = self.shards.get(parameter)
        return None if shards is None else shards[rank]

    def sharers(self, parameter: str, rank: int) -> tuple[int, ...]:
        """Return the processes over which gradients of this shard are summed; all its holders
        agree."""
        shards = self.shards.get(parameter)
        if shards is None:
            return tuple(range(self.tp)) if parameter in self.partial else (rank,)
        return tuple(process for process in range(self.tp) if shards[process] == shards[rank])

    def is_replica(self, parameter: str, rank: int) -> bool:
        """Return True if an earlier process holds the same shard."""
        shards = self.shards.get(parameter)
        return rank > 0 if shards is None else shards[rank] in shards[:rank]

    def edges(self, parameter: str) -> tuple[int, ...] | None:
        """Return the ascending bounds of all processes' ranges; None for a replicated parameter."""
        shards = self.shards.get(parameter)
        if shards is None:
            return None
        return tuple(sorted({edge for s in shards for bounds in s.ranges for edge in bounds}))

    def vocabulary(self, rank: int) -> Range | None:
        """Return [start, stop) of the logits that this process computes; None for all."""
        return None if self.head is None else self.shards[self.head][rank].ranges[0]


@dataclass(frozen=True)
class Choices:
    """Options of a plan that the model's rules leave open; see ``actors/probe/tensor.py``.

    Attributes:
        gather: ``"attention"`` or ``"all"``: gather outputs of columns there, so that every process
            computes all operations between columns and rows. This is always correct, and slower.
        fused: layout of fused columns, if they need not be gathered: ``"blocks"``, one projection
            after another; ``"heads"``, all projections of a head together; ``"feed_forward"``,
            blocks, with attention gathered.
        partial: names of replicated parameters with a partial gradient, with ``*`` for numbers.
    """

    gather: str = ""
    shard_vocabulary: bool = True
    fused: str = ""
    partial: frozenset[str] = frozenset()


def tensor_plan(
    source: ModuleSource, tp: int, name: str, choices: Choices = Choices()
) -> TensorPlan:
    """Return the plan of a language model, an encoder or a projector, named ``name`` in errors.

    Raises:
        PlanError: heads or feed-forward widths cannot be split over ``tp``, or Hugging Face's plan
            for the model has an unsupported style.
    """
    return plan_module(source.skeleton(), tp, name, choices)


def plan_module(
    module: nn.Module, tp: int, name: str, choices: Choices = Choices(), *, ragged: bool = False
) -> TensorPlan:
    """Return the plan of a complete module or skeleton; ``ragged`` accepts uneven feed-forward
    widths.

    See :func:`tensor_plan`.
    """
    try:
        rules = _rules(module, tp)
    except ModelError as error:
        raise PlanError(
            f"tp of {name!r} is {tp}, but in {type(module).__name__} {error}, which raymm does "
            "not support; set it to 1"
        ) from None
    planner = _Planner(module, tp, name, ragged)
    for unit in rules.units:
        planner.add_unit(unit, choices)
    for experts in rules.experts:
        planner.add_experts(experts)
    for parameter in rules.parameters:
        planner.add_by_heads(parameter)
    if choices.shard_vocabulary:
        planner.add_vocabulary()
    return planner.finish(choices.partial)


def _rules(module: nn.Module, tp: int) -> Rules:
    if isinstance(module, Projector):
        linear = [n for n, child in module.named_modules() if isinstance(child, nn.Linear)]
        if len(linear) != 2 or widths(module.get_submodule(linear[0]))[1] % tp:
            return Rules()
        return Rules((Unit("layers", False, (linear[0],), (linear[1],)),))
    return find_rules(module)


class _Planner:
    """Builder of a plan."""

    def __init__(self, module: nn.Module, tp: int, name: str, ragged: bool) -> None:
        self.module, self.tp, self.name, self.ragged = module, tp, name, ragged
        self.styles: dict[str, str] = {}
        self.attributes: dict[str, dict[str, int]] = {}
        self.tails: dict[str, int] = {}
        self.shards: dict[str, tuple[ParameterShard, ...]] = {}
        self.partial: set[str] = set()
        self.head: str | None = None
        self.heads: dict[str, Heads] = {}

    def refuse(self, what: str, accepted: str) -> NoReturn:
        raise PlanError(
            f"tp of {self.name!r} is {self.tp}, but {type(self.module).__name__} has {what}; "
            f"accepted: {accepted}"
        )

    def add_unit(self, unit: Unit, choices: Choices) -> None:
        gather = choices.gather == "all" or (unit.heads and choices.gather == "attention")
        if unit.fused and not gather:
            supported = choices.fused in ("blocks", "heads") if unit.heads else choices.fused
            if not supported or not self._add_fused(unit, choices.fused):
                self._add_gathered(unit)
        elif unit.gathered or gather:
            self._add_gathered(unit)
        elif unit.heads:
            self._add_heads(unit)
        else:
            for column in unit.columns:
                width = widths(self.module.get_submodule(column))[1]
                self._shard(column, COLUMN, self._features(column, width))
            for row in unit.rows:
                width = widths(self.module.get_submodule(row))[0]
                self._shard(row, ROW, self._features(row, width))

    def _add_gathered(self, unit: Unit) -> None:
        for column in unit.columns:
            width = widths(self.module.get_submodule(column))[1]
            self._shard(column, GATHERED_COLUMN, shares(width, self.tp))
        for row in unit.rows:
            width = widths(self.module.get_submodule(row))[0]
            self._shard(row, SPLIT_ROW, shares(width, self.tp))

    def _add_fused(self, unit: Unit, layout: str) -> bool:
        """Shard a column of several projections; return False if it cannot be split."""
        (column,), (row,) = unit.columns, unit.rows
        inner = widths(self.module.get_submodule(row))[0]
        if not unit.heads:
            if inner % self.tp and not self.ragged:
                return False
            query_ranges = shares(inner, self.tp)
            blocks = [((lo, hi), (inner + lo, inner + hi)) for lo, hi in query_ranges]
            self._shard(column, COLUMN, blocks)
            self._shard(row, ROW, query_ranges)
            return True
        heads = count_heads(self.module, unit)
        if heads is None or heads.query % self.tp or heads.key % self.tp:
            return False
        query_ranges, keys = shares(inner, self.tp), inner // heads.query * heads.key
        if layout == "blocks":
            key_ranges = shares(keys, self.tp)
            blocks = [
                (q, *((start + k[0], start + k[1]) for start in (inner, inner + keys)))
                for q, k in zip(query_ranges, key_ranges, strict=True)
            ]
        else:
            blocks = shares(inner + 2 * keys, self.tp)
        self._shard(column, COLUMN, blocks)
        self._shard(row, ROW, query_ranges)
        self.attributes[unit.where] = local_attributes(self.module, unit, heads, self.tp)
        return True

    def _add_heads(self, unit: Unit) -> None:
        heads = count_heads(self.module, unit)
        if heads is None:
            self.refuse(f"no number of heads that fits the widths of {unit.where!r}", "1")
        self._check_heads(heads, unit)
        self.heads[unit.where] = heads
        for column in unit.columns:
            width = widths(self.module.get_submodule(column))[1]
            count = heads.key if is_key_or_value(column) else heads.query
            if width % count:
                self.refuse(f"{width} outputs in {column!r} for {count} heads", "1")
            self._shard(column, COLUMN, self._by_heads(width, count))
        for row in unit.rows:
            width = widths(self.module.get_submodule(row))[0]
            if width % heads.query:
                self.refuse(f"{width} inputs in {row!r} for {heads.query} heads", "1")
            self._shard(row, ROW, self._by_heads(width, heads.query))
        for norm in unit.partial:
            inner = self.module.get_submodule(norm)
            self.partial |= {f"{norm}.{n}" for n, _ in inner.named_parameters()}
        self.tails |= unit.tails
        self.attributes[unit.where] = local_attributes(self.module, unit, heads, self.tp)

    def _check_heads(self, heads: Heads, unit: Unit) -> None:
        if heads.query % self.tp:
            self.refuse(
                f"{heads.query} query heads in {unit.where!r}", f"divisors of {heads.query}"
            )
        if heads.key % self.tp and self.tp % heads.key:
            fits = [
                n for n in range(1, heads.query + 1)
                if heads.query % n == 0 and (heads.key % n == 0 or n % heads.key == 0)
            ]
            self.refuse(
                f"{heads.key} KV heads in {unit.where!r}, and neither divides the other",
                ", ".join(map(str, fits)),
            )

    def _by_heads(self, width: int, count: int) -> list[Range]:
        """Return the features of each process's heads; with fewer heads than processes, some share
        one."""
        size, heads = width // count, max(1, count // self.tp)
        first = [rank * count // self.tp for rank in range(self.tp)]
        return [(head * size, (head + heads) * size) for head in first]

    def _features(self, where: str, width: int) -> list[Range]:
        if width % self.tp and not self.ragged:
            self.refuse(f"{width} inner features at {where!r}", f"divisors of {width}")
        return shares(width, self.tp)

    def _shard(self, where: str, style: str, parts: Sequence[Range | Ranges]) -> None:
        """Shard a linear module: columns by outputs, rows by inputs; one part or several per
        process."""
        ranges = [
            cast(Ranges, portion) if isinstance(portion[0], tuple) else (cast(Range, portion),)
            for portion in parts
        ]
        linear = self.module.get_submodule(where)
        self.styles[where] = style
        by_output = style in (COLUMN, GATHERED_COLUMN)
        dim = int(by_output == isinstance(linear, Conv1D))
        self.shards[f"{where}.weight"] = tuple(ParameterShard(dim, local) for local in ranges)
        if by_output and linear.bias is not None:
            self.shards[f"{where}.bias"] = tuple(ParameterShard(0, local) for local in ranges)
        if isinstance(linear, AdaptedLayer):
            self._shard_adapter(where, by_output, ranges)

    def _shard_adapter(self, where: str, by_output: bool, ranges: Sequence[Ranges]) -> None:
        """Shard the adapter matrix at the sharded side; the other is replicated with partial
        gradients."""
        layer = cast(AdaptedLayer, self.module.get_submodule(where))
        try:
            self.shards |= {f"{where}.{n}": s for n, s in split(layer, by_output, ranges).items()}
        except ValueError as error:
            self.refuse(f"{error} in {where!r}", "less")
        self.partial.add(f"{where}.{LOW if by_output else HIGH}")

    def add_experts(self, experts: Experts) -> None:
        """Shard every expert over all processes."""
        self.styles[experts.where] = EXPERTS
        for parameter, (dim, blocks) in experts.dims.items():
            shape = self.module.get_parameter(parameter).shape
            if len(shape) != 3:
                self.refuse(f"{parameter!r} of shape {tuple(shape)}, not of three dims", "1")
            width = shape[dim] // blocks
            self.shards[parameter] = tuple(
                ParameterShard(
                    dim, tuple((start + b * width, stop + b * width) for b in range(blocks))
                )
                for start, stop in self._features(parameter, width)
            )

    def add_by_heads(self, parameter: str) -> None:
        """Shard an attention's bare parameter that has a row per head (attention sinks)."""
        unit_name = parameter.rpartition(".")[0]
        length = self.module.get_parameter(parameter).shape[0]
        heads = self.heads.get(unit_name)
        if heads is None or length % heads.query:
            self.refuse(f"{parameter!r} with {length} rows, which are not heads", "1")
        ranges = self._by_heads(length, heads.query)
        self.shards[parameter] = tuple(ParameterShard(0, (r,)) for r in ranges)

    def add_vocabulary(self) -> None:
        """Shard embedding and output head by rows of their weights."""
        head = output_head(self.module)
        if head is None:
            return
        linear, embedding = self.module.get_submodule(head), input_embeddings(self.module)
        by_rows = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
        size = widths(linear)[1]
        if size < self.tp or (not by_rows and embedding.weight is linear.weight):
            return
        self._shard(head, COLUMN, shares(size, self.tp))
        self.head = f"{head}.weight"
        if by_rows and embedding.num_embeddings >= self.tp:
            path = next(n for n, m in self.module.named_modules() if m is embedding)
            ranges = shares(embedding.num_embeddings, self.tp)
            self.styles[path] = EMBEDDING
            self.shards[f"{path}.weight"] = tuple(ParameterShard(0, (r,)) for r in ranges)

    def finish(self, partial: frozenset[str]) -> TensorPlan:
        for names in tied_names(self.module):
            shards = {self.shards[name] for name in names if name in self.shards}
            if len(shards) > 1:
                self.refuse(f"one parameter, {names[0]!r}, in modules with different shares", "1")
            for shard in shards:  # also under names outside sharded modules
                self.shards |= dict.fromkeys(names, shard)
            if not shards and generic(names[0]) in partial:
                self.partial |= set(names)
        return TensorPlan(
            self.tp, self.styles, self.attributes, self.tails, self.shards,
            frozenset(self.partial), self.head,
        )


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of every parameter; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def shares(width: int, tp: int) -> list[Range]:
    """Return [start, stop) of ``tp`` contiguous shares; the first ones may be one longer."""
    base, longer = divmod(width, tp)
    bounds = [rank * base + min(rank, longer) for rank in range(tp + 1)]
    return list(zip(bounds, bounds[1:], strict=False))




@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and KV heads of an attention module."""

    query: int
    key: int


def count_heads(module: nn.Module, unit: Unit) -> Heads | None:
    """Return an attention unit's heads, from attributes, config and projection widths; None if
    unknown."""
    container = module.get_submodule(unit.where)
    configs = [getattr(container, "config", None), *_configs(module, unit.where)]
    out = {name: widths(module.get_submodule(name))[1] for name in unit.columns}
    queries = [width for name, width in out.items() if is_query(name)] or list(out.values())
    keys = [width for name, width in out.items() if is_key_or_value(name)]
    head_dim = _first_number((container,), _HEAD_DIMS)
    if unit.fused:
        queries = [widths(module.get_submodule(name))[0] for name in unit.rows]
    candidates = [
        _first_number((container,), _QUERY_COUNTS),
        *(_first_number((config,), _CONFIG_HEADS) for config in configs),
        queries[0] // head_dim if head_dim else None,
    ]
    query = next((n for n in candidates if n and all(w % n == 0 for w in queries)), None)
    if query is None:
        return None
    if unit.fused:
        size = queries[0] // query
        (width,) = out.values()
        key, remainder = divmod(width - queries[0], 2 * size)
        return Heads(query, key) if key > 0 and not remainder and query % key == 0 else None
    if not keys or keys[0] == queries[0]:
        return Heads(query, query)
    candidates = [
        keys[0] // head_dim if head_dim and keys[0] % head_dim == 0 else None,
        _first_number((container, *configs), _KEY_COUNTS),
        query * keys[0] // queries[0],
    ]
    key = next((n for n in candidates if n and all(w % n == 0 for w in keys)), None)
    return None if key is None or query % key else Heads(query, key)


def local_attributes(module: nn.Module, unit: Unit, heads: Heads, tp: int) -> dict[str, int]:
    """Return an attention's head counts and total head widths for 1/``tp`` of the heads, by
    attribute."""
    container = module.get_submodule(unit.where)
    key = max(1, heads.key // tp)
    values = {
        **{(name, heads.key): key for name in _KEY_COUNTS},
        **{(name, heads.query): heads.query // tp for name in _QUERY_COUNTS},
    }
    if unit.fused or any(is_key_or_value(name) for name in unit.columns):
        groups = heads.query // heads.key
        values |= {(name, groups): heads.query // tp // key for name in _GROUPS}
    inner = {widths(module.get_submodule(name))[0] for name in unit.rows}
    values |= {(name, width): width // tp for name in _SIZES for width in inner}
    local = {
        name: new
        for (name, old), new in values.items()
        if type(vars(container).get(name)) is int and vars(container)[name] == old
    }
    config = getattr(container, "config", None)
    if unit.fused and config is not None:  # fused units split their output by the config
        in_config = {n: heads.query // tp for n in _CONFIG_HEADS} | {_KEY_COUNTS[0]: key}
        local |= {CONFIG + n: new for n, new in in_config.items() if hasattr(config, n)}
    return local


def local_query_heads(attributes: Mapping[str, int]) -> int | None:
    """Return the number of query heads in a result of :func:`local_attributes`."""
    names = (*_QUERY_COUNTS, *(CONFIG + name for name in _CONFIG_HEADS))
    return next((attributes[name] for name in names if name in attributes), None)


def _configs(module: nn.Module, where: str) -> list[Any]:
    """Return the configs of the surrounding modules, the innermost first."""
    path = where.split(".")
    parents = [module.get_submodule(".".join(path[:n])) for n in range(len(path), -1, -1)]
    configs = [child.config for child in parents if getattr(child, "config", None) is not None]
    return [getattr(c, "get_text_config", lambda c=c: c)() for c in configs]


def _first_number(owners: Any, names: tuple[str, ...]) -> int | None:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None
