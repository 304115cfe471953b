"""Modules that are sharded together, as data, and what can be sharded at all.

A *unit* is what only makes sense together: columns, whose outputs lie side by side, and the
rows that take them in (Megatron-LM §3).
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
    """The part of a parameter that a process holds.

    Attributes:
        dim: along which dim it is cut.
        ranges: [start, stop) of what is held, in the order in which it lies in the shard;
            several where a parameter holds several matrices (a fused gate and up).
    """

    dim: int
    ranges: Ranges

    @property
    def length(self) -> int:
        """How long the shard is along its dim."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Unit:
    """Modules that are sharded together.

    Attributes:
        where: name of the module that holds head counts, for attention; else of the one around
            the unit.
        heads: whether the shares are heads.
        columns: names of modules whose output is split.
        rows: names of modules whose input is.
        gathered: whether outputs of columns are put together again, and inputs of rows split,
            so that what lies between is computed whole by every process.
        partial: names of modules between columns and rows whose parameters get, on every
            process, the gradient of its own heads only.
        tails: per module that feeds columns past other columns (the rotary part of
            multi-head latent attention), how many of its last outputs go to heads directly.
        fused: how many projections one column is (gate and up: 2; query, key and value: 3).
            Such a unit is gathered unless one knows how they are laid out.
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
    """A module whose 3-D parameters are matrices of all experts, as Hugging Face keeps them.

    Attributes:
        where: name of the module.
        dims: per parameter name (dim, blocks): what dim is split, and how many blocks of
            equal length lie along it (gate and up: 2).
    """

    where: str
    dims: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Rules:
    """What is sharded. ``parameters``: bare ones that are split by heads along dim 0."""

    units: tuple[Unit, ...] = ()
    experts: tuple[Experts, ...] = ()
    parameters: tuple[str, ...] = ()


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is one whose matrix product can be sharded: exactly ``nn.Linear`` or
    Hugging Face's ``Conv1D``, or one of these with an adapter, as another subclass may do something
    else; with a weight that the part of a model has."""
    kinds = type(module) in (nn.Linear, Conv1D) or isinstance(module, AdaptedLayer)
    return kinds and "weight" in cast(nn.Module, module)._parameters


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear module."""
    if isinstance(module, AdaptedLayer):
        return module.widths[1], module.widths[0]
    rows, columns = cast(nn.Linear | Conv1D, module).weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def split(
    layer: AdaptedLayer, by_output: bool, ranges: Sequence[Ranges]
) -> dict[str, tuple[ParameterShard, ...]]:
    """Which shards of a layer's adapter and quantised weight processes have, by name.

    Args:
        layer: with an adapter.
        by_output: whether its outputs are split, else its inputs.
        ranges: of them, per process.

    Raises:
        ValueError: a process would have a part of the inputs that share a scale.
    """
    def shards(dim: int, size: int = 1) -> tuple[ParameterShard, ...]:
        if any(edge % size for own in ranges for part in own for edge in part):
            raise ValueError(f"{size} inputs with one scale, and a split between them,")
        return tuple(
            ParameterShard(dim, tuple((lo // size, hi // size) for lo, hi in own))
            for own in ranges
        )

    if by_output:
        return {name: shards(0) for name in (HIGH, MAGNITUDE, SCALE)}
    if not layer.packed:
        return {LOW: shards(1)}
    place = int(not isinstance(layer, Conv1D))
    return {LOW: shards(1), SCALE: shards(1, GROUP), "weight": shards(place, PACKED)}


def leaf_name(name: str) -> str:
    """What follows the last dot of a name."""
    return name.rpartition(".")[2]


def parent_name(name: str) -> str:
    """What is before the last dot of a name; empty without one."""
    return name.rpartition(".")[0]


def head_name(module: nn.Module) -> str | None:
    """Name of the module that makes logits."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        head = get() if get else None
    except (NotImplementedError, AttributeError):
        head = None
    names = (name for name, child in module.named_modules() if child is head)
    return None if head is None else next(names, None)


def output_head(module: nn.Module) -> str | None:
    """Name of the linear module that makes a language model's logits; None if there is none."""
    name = head_name(module)
    return name if name is not None and is_linear(module.get_submodule(name)) else None


def is_query(name: str) -> bool:
    """Whether a column's name says that it makes queries."""
    return leaf_name(name) in QUERY_LEAVES


def is_key_or_value(name: str) -> bool:
    """Whether a column's name says that it makes keys or values."""
    return leaf_name(name) in KEY_VALUE_LEAVES
