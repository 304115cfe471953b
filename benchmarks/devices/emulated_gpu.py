"""Emulated GPUs for multiplexed programs.

Modules sleep for the time that the performance model of a mapping problem predicts, and send tiny
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.devices.emulated_backend import EmulatedBackend, EmulatedModule
from raymm.actors.quota import Multiprocessors
from raymm.scheduler.multiplex.mapping import Placement, module_seconds
from raymm.scheduler.multiplex.problem import MappingProblem


class Slice(NamedTuple):
    """Share of the work of one of the problem's modules that a node represents."""

    module: str
    share: float = 1.0


@dataclass(frozen=True)
class SurfaceSeconds:
    """Seconds of a module's forward or backward, by its scaling surface and by interference.

    Interference is from modules on the same GPU (Mosaic eq. 7 and 8).

    Attributes:
        problem: problem with surfaces and interference.
        slices: node -> represented slice.
        share: share of an iteration's time.
    """

    problem: MappingProblem
    slices: Mapping[str, Slice]
    share: float

    def __call__(
        self, module: str, degree: int, quota: float, colocated: Mapping[str, float]
    ) -> float:
        """Return seconds as :class:`benchmarks.devices.emulated_backend.Seconds` does; 0 for other
        nodes."""
        if module not in self.slices:
            return 0.0
        name, part = self.slices[module]
        quotas = {
            self.slices[other].module: share for other, share in colocated.items()
            if other in self.slices
        }
        steps = {other: round(share * self.problem.steps) for other, share in quotas.items()}
        own = Placement(name, tuple(range(degree)), round(quota * self.problem.steps))
        others = [Placement(o, (0,), n) for o, n in steps.items() if o != name]
        return module_seconds(self.problem, [own, *others])[0] * part * self.share


@dataclass(frozen=True)
class EmulatedGpu:
    """Factory for the backend of one emulated GPU, called in the process of that GPU.

    Attributes:
        slices: node of the program -> represented slice.
        forward_share: share of the forward in a module's iteration.
    """

    problem: MappingProblem
    slices: Mapping[str, Slice]
    forward_share: float = 1 / 3

    def __call__(self) -> EmulatedBackend:
        """Return the backend; its quotas are exactly the problem's steps."""
        return EmulatedBackend(
            SurfaceSeconds(self.problem, self.slices, self.forward_share),
            SurfaceSeconds(self.problem, self.slices, 1 - self.forward_share),
            Multiprocessors(self.problem.steps, 1),
        )


class EmulatedNode(nn.Module):
    """Module that adds up its inputs (n, W) and sleeps.

    Args:
        degree: number of GPUs that it is replicated on.
        loss: True to return (n,), the means over W.
    """

    def __init__(self, degree: int, loss: bool = False) -> None:
        super().__init__()
        self.work = EmulatedModule(degree)
        self.loss = loss

    def forward(self, own: slice | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Add inputs of one shape; with ``own``, the slice of all samples that belong to this
        replica.
        """
        total = self.work(sum(inputs.values()))
        if own is not None:
            total = total[own]
        return total.mean(1) if self.loss else total
