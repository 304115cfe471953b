"""Which piece of each parameter of a module a tensor-parallel process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from raymm.actors.stages.tensor_plan import Piece, TensorPlan


@dataclass(frozen=True)
class ChainPieces:
    """The pieces of a module and what goes with it (an encoder and its projector).

    Attributes:
        plans: by attribute of the stage (``"module"``, ``"projector"``), which is what names of
            parameters begin with; what has no plan is whole on every process.
    """

    plans: Mapping[str, TensorPlan] = field(default_factory=dict)

    def piece(self, name: str, tp: int) -> Piece | None:
        """What process ``tp`` holds of a parameter; None if all of it."""
        plan, rest = self._find(name)
        return None if plan is None else plan.piece(rest, tp)

    def holders(self, name: str, tp: int) -> tuple[int, ...]:
        """The processes whose gradients add up to that of ``tp``'s piece."""
        plan, rest = self._find(name)
        return (tp,) if plan is None else plan.holders(rest, tp)

    def is_replica(self, name: str, tp: int) -> bool:
        """Whether a process before ``tp`` holds the very same."""
        plan, rest = self._find(name)
        return tp > 0 if plan is None else plan.is_replica(rest, tp)

    def _find(self, name: str) -> tuple[TensorPlan | None, str]:
        part, _, rest = name.partition(".")
        return self.plans.get(part), rest

    def add(
        self, whole: torch.Tensor | None, name: str, tp: int, degree: int, local: torch.Tensor
    ) -> torch.Tensor:
        """Add a process's piece to the whole parameter (None: nothing yet, zeros)."""
        piece = self.piece(name, tp)
        if piece is None:
            return local.clone() if whole is None else whole + local
        if whole is None:
            others = [self.piece(name, other) for other in range(degree)]
            shape = list(local.shape)
            shape[piece.dim] = max(stop for one in others for _, stop in one.ranges)
            whole = local.new_zeros(shape)
        for part, (start, stop) in zip(parts_of(local, piece), piece.ranges, strict=True):
            whole.narrow(piece.dim, start, stop - start).add_(part)
        return whole


def parts_of(local: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, ...]:
    """A piece's tensor, range by range."""
    return local.split([stop - start for start, stop in piece.ranges], piece.dim)
