"""Descriptions of modules that are sharded together.

A *unit* has columns, with their outputs split, and the rows that consume them (Megatron-LM §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import HIGH, LOW, MAGNITUDE, AdaptedLayer
from raymm.actors.adapters.quantised import GROUP, PACKED, SCALE

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
