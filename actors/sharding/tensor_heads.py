"""Head counts of attention modules, and the attributes that depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raymm.actors.sharding.tensor_units import Unit, is_key_or_value, is_query, widths

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
