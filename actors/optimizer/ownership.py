"""What a process has of parameters that others have too."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.actors.optimizer.gradient_reduction import SharedParameter
from raymm.scheduler.plan.stage import StageId


@dataclass(frozen=True)
class ParameterOwnership:
    """What a process has of parameters that others have too.

    Attributes:
        shared: parameters that are summed with others, in an order common to all processes.
        in_grad_norm: (stage, name) of the parameters that this process, among all that have the
            very same, counts in the gradient norm; it writes their optimizer state, too.
        saves: those whose values it writes.
    """

    shared: tuple[SharedParameter, ...] = ()
    in_grad_norm: frozenset[tuple[StageId, str]] = frozenset()
    saves: frozenset[tuple[StageId, str]] = frozenset()
