"""Ownership of parameter shards; parameters that no plan names are replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard


class ShardPlan(Protocol):
    """Interface of ``TensorPlan`` and ``FullyShardedPlan``; ``place`` is a process's rank among
    sharers."""

    def shard(self, parameter: str, place: int, /) -> ParameterShard | None: ...

    def sharers(self, parameter: str, place: int, /) -> tuple[int, ...]: ...

    def is_replica(self, parameter: str, place: int, /) -> bool: ...

    def edges(self, parameter: str, /) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class ParameterPart:
    """Part of a parameter that a process holds: ``ranges`` [start, stop) along ``dim``, in order.

    ``shape`` is that of the full parameter, and ``edges`` bounds the ranges of all processes.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    edges: tuple[int, ...] = ()

    @property
    def folded(self) -> tuple[int, int, int]:
        """Number of elements before, along and after the sharded dimension."""
        shape, dim = self.shape, self.dim
        return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])

    @classmethod
    def from_whole(cls, shape: Sequence[int]) -> ParameterPart:
        """Return the part of a process that holds the full parameter."""
        shape = tuple(shape) or (1,)
        return cls(shape, 0, ((0, shape[0]),))


@dataclass(frozen=True)
class ShardSpec:
    """Shards of a stage's modules (an encoder and its projector); modules without plan are
    replicated.

    Attributes:
        plans: by attribute of the stage (``"module"``, ``"projector"``), the first part of names.
        shards: number of FSDP shards over processes that share a microbatch; 1 for tensor
            parallelism.
    """

    plans: Mapping[str, ShardPlan] = field(default_factory=dict)
    shards: int = 1

    def place(self, tp: int, data: int) -> int:
        """Return a process's rank among sharers, given its tensor-parallel and its data rank."""
        return data if self.shards > 1 else tp

    def shard(self, name: str, place: int) -> ParameterShard | None:
        """Return a process's shard of a parameter; None if it holds the full parameter."""
        plan, local_name = self._find(name)
        return None if plan is None else plan.shard(local_name, place)

    def part(self, name: str, place: int, local: Sequence[int]) -> ParameterPart:
        """Return the part of a parameter that a process holds, given the local shape."""
        plan, local_name = self._find(name)
        shard = None if plan is None else plan.shard(local_name, place)
        edges = None if plan is None else plan.edges(local_name)
        if shard is None or edges is None:
            return ParameterPart.from_whole(local)
        shape = tuple(edges[-1] if n == shard.dim else size for n, size in enumerate(local))
        return ParameterPart(shape, shard.dim, tuple(shard.ranges), edges)

    def length(self, name: str) -> int | None:
        """Return the length of a parameter's sharded dimension; None for a replicated parameter."""
        plan, local_name = self._find(name)
        edges = None if plan is None else plan.edges(local_name)
        return None if edges is None else edges[-1]

    def splits_blocks(self, name: str, elements: int, block: int) -> bool:
        """Return True if a shard may end within a block of ``block`` consecutive elements.

        ``elements`` is the size of the full parameter.
        """
        plan, local_name = self._find(name)
        edges = None if plan is None else plan.edges(local_name)
        shard = None if plan is None else plan.shard(local_name, 0)
        if shard is None or edges is None:
            return False
        inner = elements // edges[-1] if shard.dim == 0 else 1
        return any(edge * inner % block for edge in edges)

    def sharers(self, name: str, place: int) -> tuple[int, ...]:
        """Return the processes over which gradients of a process's shard are summed."""
        plan, local_name = self._find(name)
        if plan is not None:
            return plan.sharers(local_name, place)
        return tuple(range(self.shards)) if self.shards > 1 else (place,)

    def is_replica(self, name: str, place: int) -> bool:
        """Return True if an earlier process holds the same values."""
        plan, local_name = self._find(name)
        return place > 0 if plan is None else plan.is_replica(local_name, place)

    def _find(self, name: str) -> tuple[ShardPlan | None, str]:
        module, _, local_name = name.partition(".")
        return self.plans.get(module), local_name

    def add(
        self, whole: torch.Tensor | None, name: str, place: int, count: int, local: torch.Tensor
    ) -> torch.Tensor:
        """Add a process's shard, one of ``count``, to the full parameter (None: zeros) and return
        it."""
        shard = self.shard(name, place)
        if shard is None:
            return local.clone() if whole is None else whole + local
        if whole is None:
            shards = [self.shard(name, other) for other in range(count)]
            shape = list(local.shape)
            shape[shard.dim] = max(
                stop for other in shards if other is not None for _, stop in other.ranges
            )
            whole = local.new_zeros(shape)
        for tensor, (start, stop) in zip(parts_of(local, shard), shard.ranges, strict=True):
            whole.narrow(shard.dim, start, stop - start).add_(tensor)
        return whole


def parts_of(local: torch.Tensor, shard: ParameterShard) -> tuple[torch.Tensor, ...]:
    """Split a shard's tensor into its ranges."""
    return local.split([stop - start for start, stop in shard.ranges], shard.dim)
