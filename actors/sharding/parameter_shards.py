"""Which shard of each parameter of a module a process holds.

Per parameter: the dimension and ranges of it that a process has, whose gradients of these must be
summed, and whether an earlier process has the very same. What no plan names is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard


class ShardPlan(Protocol):
    """Who has what of a module's parameters: a ``TensorPlan`` or a ``FullyShardedPlan``. Processes
    are numbered by their place among those that share the parameters."""

    def shard(self, parameter: str, place: int, /) -> ParameterShard | None: ...

    def sharers(self, parameter: str, place: int, /) -> tuple[int, ...]: ...

    def is_replica(self, parameter: str, place: int, /) -> bool: ...

    def edges(self, parameter: str, /) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class ParameterPart:
    """Part of a parameter that a process holds.

    Attributes:
        shape: of the whole parameter.
        dim: dimension that is sharded.
        ranges: [start, stop) of each stretch of it that the process holds, in order.
        edges: where a stretch of any process begins or ends.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    edges: tuple[int, ...] = ()

    @property
    def folded(self) -> tuple[int, int, int]:
        """Elements before the sharded dimension, along it and behind it."""
        shape, dim = self.shape, self.dim
        return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])

    @classmethod
    def from_whole(cls, shape: Sequence[int]) -> ParameterPart:
        """Part of a process that holds the whole parameter."""
        shape = tuple(shape) or (1,)
        return cls(shape, 0, ((0, shape[0]),))


@dataclass(frozen=True)
class ShardSpec:
    """The shards of a module and what goes with it (an encoder and its projector).

    Attributes:
        plans: by attribute of the stage (``"module"``, ``"projector"``), which is what names of
            parameters begin with; what has no plan is whole on every process.
        shards: over how many processes that share a microbatch the parameters are shared out;
            1 if over those that share its work on every token (tensor parallelism).
    """

    plans: Mapping[str, ShardPlan] = field(default_factory=dict)
    shards: int = 1

    def place(self, tp: int, data: int) -> int:
        """Which of the processes that share parameters one is, from its place among those of
        tensor parallelism and among those that share a microbatch."""
        return data if self.shards > 1 else tp

    def shard(self, name: str, place: int) -> ParameterShard | None:
        """What a process holds of a parameter; None if all of it."""
        plan, rest = self._find(name)
        return None if plan is None else plan.shard(rest, place)

    def part(self, name: str, place: int, local: Sequence[int]) -> ParameterPart:
        """Return the part of a parameter that a process holds.

        Args:
            name: the parameter's.
            place: which of the processes that share the module's parameters.
            local: shape of what it holds.
        """
        plan, rest = self._find(name)
        shard = None if plan is None else plan.shard(rest, place)
        edges = None if plan is None else plan.edges(rest)
        if shard is None or edges is None:
            return ParameterPart.from_whole(local)
        shape = tuple(edges[-1] if n == shard.dim else size for n, size in enumerate(local))
        return ParameterPart(shape, shard.dim, tuple(shard.ranges), edges)

    def length(self, name: str) -> int | None:
        """Return the length of the dimension of a parameter that is sharded; None if none is.

        Args:
            name: the parameter's.
        """
        plan, rest = self._find(name)
        edges = None if plan is None else plan.edges(rest)
        return None if edges is None else edges[-1]

    def splits_blocks(self, name: str, elements: int, block: int) -> bool:
        """Return True if a shard of a parameter may end within a block of consecutive elements.

        Args:
            name: the parameter's.
            elements: of the whole parameter.
            block: elements of a block.
        """
        plan, rest = self._find(name)
        edges = None if plan is None else plan.edges(rest)
        shard = None if plan is None else plan.shard(rest, 0)
        if shard is None or edges is None:
            return False
        inner = elements // edges[-1] if shard.dim == 0 else 1
        return any(edge * inner % block for edge in edges)

    def sharers(self, name: str, place: int) -> tuple[int, ...]:
        """The processes whose gradients add up to that of a process's shard."""
        plan, rest = self._find(name)
        if plan is not None:
            return plan.sharers(rest, place)
        return tuple(range(self.shards)) if self.shards > 1 else (place,)

    def is_replica(self, name: str, place: int) -> bool:
        """Whether a process before it holds the very same."""
        plan, rest = self._find(name)
        return place > 0 if plan is None else plan.is_replica(rest, place)

    def _find(self, name: str) -> tuple[ShardPlan | None, str]:
        part, _, rest = name.partition(".")
        return self.plans.get(part), rest

    def add(
        self, whole: torch.Tensor | None, name: str, place: int, count: int, local: torch.Tensor
    ) -> torch.Tensor:
        """Add a process's shard, one of ``count``, to the whole parameter (None: nothing yet,
        zeros).

        Args:
            whole: what the pieces before it have made; None before the first.
            name: the parameter's.
            place: which piece it is.
            count: how many there are.
            local: the piece.
        """
        shard = self.shard(name, place)
        if shard is None:
            return local.clone() if whole is None else whole + local
        if whole is None:
            others = [self.shard(name, other) for other in range(count)]
            shape = list(local.shape)
            shape[shard.dim] = max(
                stop for other in others if other is not None for _, stop in other.ranges
            )
            whole = local.new_zeros(shape)
        for part, (start, stop) in zip(parts_of(local, shard), shard.ranges, strict=True):
            whole.narrow(shard.dim, start, stop - start).add_(part)
        return whole


def parts_of(local: torch.Tensor, shard: ParameterShard) -> tuple[torch.Tensor, ...]:
    """A shard's tensor, range by range."""
    return local.split([stop - start for start, stop in shard.ranges], shard.dim)
