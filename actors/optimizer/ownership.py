"""Duties of a process for parameters that other processes hold, too."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.actors.optimizer.gradient_reduction import SharedParameter
from raymm.scheduler.plan.stage import StageId


@dataclass(frozen=True)
class ParameterOwnership:
    """Duties of a process for parameters that other processes hold, too.

    Attributes:
        shared: parameters whose gradients are summed, in an order common to all processes.
        in_grad_norm: parameters that this process, among all processes with identical copies,
            counts in the gradient norm, and whose optimizer state it writes.
    """

    shared: tuple[SharedParameter, ...] = ()
    in_grad_norm: frozenset[tuple[StageId, str]] = frozenset()
    saves: frozenset[tuple[StageId, str]] = frozenset()
