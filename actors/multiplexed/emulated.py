"""Emulated GPUs for multiplexed programs: modules sleep for as long as the performance model of a
mapping problem says, and hand on tiny tensors that are really sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from raymm.actors.quota import EmulatedBackend, EmulatedModule, Multiprocessors
from raymm.scheduler.multiplex.problem import MappingProblem


@dataclass(frozen=True)
class SurfaceSeconds:
    """Seconds of a module's forward (or backward) by its scaling surface, and by what disturbs
    it on the GPU where it runs (Mosaic eq. 7 and 8).

    Attributes:
        problem: with surfaces and interference.
        share: of an iteration's time.
    """

    problem: MappingProblem
    share: float

    def __call__(
        self, module: str, degree: int, quota: float, neighbours: Mapping[str, float]
    ) -> float:
        """As of :class:`raymm.actors.quota.Seconds`. Losses that the problem does not have take
        no time."""
        problem = self.problem
        if module not in problem.names:
            return 0.0
        m = problem.names.index(module)
        others = sorted(problem.names.index(one) for one in neighbours if one in problem.names)
        use = [self._bandwidth(o, neighbours[problem.names[o]]) for o in others]
        delay = problem.interference.delay(self._bandwidth(m, quota), use)
        alone = problem.seconds[m, degree.bit_length() - 1, self._steps(quota)]
        return float(problem.interference.seconds(float(alone), delay)) * self.share

    def _steps(self, quota: float) -> int:
        return round(quota * self.problem.steps)

    def _bandwidth(self, m: int, quota: float) -> float:
        return float(self.problem.bandwidth[m, self._steps(quota)])


@dataclass(frozen=True)
class EmulatedGpu:
    """Makes the backend of one emulated GPU, in the process that is it.

    Attributes:
        problem: what is emulated.
        forward_share: share of a module's iteration that is its forward.
    """

    problem: MappingProblem
    forward_share: float = 1 / 3

    def __call__(self) -> EmulatedBackend:
        """The backend; its quotas are the problem's steps, exactly."""
        return EmulatedBackend(
            SurfaceSeconds(self.problem, self.forward_share),
            SurfaceSeconds(self.problem, 1 - self.forward_share),
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
