"""Emulated GPUs for multiplexed programs: modules sleep for as long as the performance model of a
mapping problem says, and hand on tiny tensors that are really sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.emulated_backend import EmulatedBackend, EmulatedModule
from raymm.actors.quota import Multiprocessors
from raymm.scheduler.multiplex.mapping import Placement, module_seconds
from raymm.scheduler.multiplex.problem import MappingProblem


class Slice(NamedTuple):
    """What a node stands for: a share of the work of one of the problem's modules."""

    module: str
    share: float = 1.0


@dataclass(frozen=True)
class SurfaceSeconds:
    """Seconds of a module's forward (or backward) by its scaling surface, and by what disturbs
    it on the GPU where it runs (Mosaic eq. 7 and 8).

    Attributes:
        problem: with surfaces and interference.
        slices: what each node stands for.
        share: of an iteration's time.
    """

    problem: MappingProblem
    slices: Mapping[str, Slice]
    share: float

    def __call__(
        self, module: str, degree: int, quota: float, colocated: Mapping[str, float]
    ) -> float:
        """As of :class:`benchmarks.emulated_backend.Seconds`. Nodes that stand for nothing take no
        time."""
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
    """Makes the backend of one emulated GPU, in the process that is it.

    Attributes:
        problem: what is emulated.
        slices: what each node of the program stands for.
        forward_share: share of a module's iteration that is its forward.
    """

    problem: MappingProblem
    slices: Mapping[str, Slice]
    forward_share: float = 1 / 3

    def __call__(self) -> EmulatedBackend:
        """The backend; its quotas are the problem's steps, exactly."""
        return EmulatedBackend(
            SurfaceSeconds(self.problem, self.slices, self.forward_share),
            SurfaceSeconds(self.problem, self.slices, 1 - self.forward_share),
            Multiprocessors(self.problem.steps, 1),
        )


class EmulatedNode(nn.Module):
    """Adds up its inputs (n, W) and sleeps.

    Args:
        degree: GPUs that it is replicated on.
        loss: return (n,), the means over W.
    """

    def __init__(self, degree: int, loss: bool = False) -> None:
        super().__init__()
        self.work = EmulatedModule(degree)
        self.loss = loss

    def forward(self, own: slice | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Any number of inputs of one shape; with ``own``, all samples of which these count."""
        total = self.work(sum(inputs.values()))
        if own is not None:
            total = total[own]
        return total.mean(1) if self.loss else total
