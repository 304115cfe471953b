"""Plans of any style as sleeping stages on the real actors.

Each stage is a separate node on the plan's ranks, quotas, replicas and schedule, and takes the time
that the plan's profile predicts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.devices.emulated_backend import EmulatedBackend, pause, quotas_here
from benchmarks.devices.emulation import ENTRY
from raymm.actors.quota import Multiprocessors
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.stage_costs import op_seconds


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage on a whole device, and on a quota next to others.

    Attributes:
        forward, backward: seconds on a whole device.
        degree: number of devices over which its samples are split.
        sharing: surfaces and interference.
        modules: node -> module.
    """

    module: str
    forward: float
    backward: float
    degree: int
    sharing: DeviceSharing
    modules: Mapping[str, str]

    def slower(self) -> float:
        """Return the slowdown factor in this thread."""
        nodes = quotas_here()
        if nodes is None:
            return 1.0
        quotas = {self.modules[node]: quota for node, quota in nodes.items()}
        own = self.module
        whole = self.sharing.seconds(own, self.degree, {own: 1.0})
        return self.sharing.seconds(own, self.degree, quotas) / whole


class _Sleeps(torch.autograd.Function):
    """Autograd function ``x + weight`` that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, takes: StageSeconds) -> Any:
        ctx.takes = takes
        pause(takes.forward * takes.slower())
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        pause(ctx.takes.backward * ctx.takes.slower())
        return grad, grad.sum(), None


class StyledNode(nn.Module):
    """Module that adds up its inputs (n, W) and sleeps.

    Args:
        loss: True to return (n,), the means over W.
    """

    def __init__(self, takes: StageSeconds, loss: bool) -> None:
        super().__init__()
        self.takes, self.loss = takes, loss
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, own: slice | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Add inputs of one shape; with ``own``, the slice of all samples that belong to this
        replica.
        """
        x = sum(inputs.values())
        assert isinstance(x, torch.Tensor)
        total = x + self.weight if x.is_meta else _Sleeps.apply(x, self.weight, self.takes)
        if own is not None:
            total = total[own]
        return total.mean(1) if self.loss else total


def backend(steps: int) -> EmulatedBackend:
    """Return a backend for quotas that the nodes emulate by sleeping."""
    return EmulatedBackend(_never, _never, Multiprocessors(steps, 1))


def _never(module: str, degree: int, quota: float, colocated: Mapping[str, float]) -> float:
    raise AssertionError(f"{module} sleeps by itself")


def styled(plan: Plan, contrastive: Collection[str] = ()) -> tuple[ModuleDag, Plan]:
    """Convert a plan to sleeping nodes and the plan that runs them.

    Args:
        plan: 1F1B or slot-based plan with surfaces in its profile, all modules trained.
        contrastive: modules that read every sample of their producers.
    """
    assert plan.profile is not None and plan.profile.sharing is not None
    seconds, sharing = op_seconds(plan), plan.profile.sharing
    firsts = {name: plan.replicas(name)[0] for name in plan.graph.topological}
    modules = {_node(stage): stage.module for stages in firsts.values() for stage in stages}
    nodes: dict[str, DagModule] = {}
    seconds_of: dict[str, StageSeconds] = {}
    for name, stages in firsts.items():
        degree = len(plan.replicas(name)) if stages[0].split == "samples" else 1
        for stage in stages:
            takes = StageSeconds(
                name, seconds[stage.id, Op.FORWARD], seconds[stage.id, Op.BACKWARD], degree,
                sharing, modules,
            )
            seconds_of[_node(stage)] = takes
            last = stage is stages[-1]
            loss = last and name in plan.graph.losses
            if stage.index:
                producers = [_node(stages[stage.index - 1])]
            else:
                producers = [_node(firsts[p][-1]) for p in plan.graph.producers(name)]
            compares = name in contrastive and not stage.index
            nodes[_node(stage)] = (DagLoss if loss else DagModule)(
                StyledNode(takes, loss),
                inputs={p: every(p) if compares else p for p in producers},
                reads=() if producers else ENTRY, draws=False,
            )
    dag = ModuleDag(nodes)
    # The order of work follows from this profile, as in the plan: costs of whole microbatches.
    profile = CostProfile({
        name: (LayerCost(
            takes.forward * takes.degree, 0.0, takes.backward * takes.degree
        ),)
        for name, takes in seconds_of.items()
    })
    return dag, Plan(
        dag.graph,
        tuple(replace(s, module=_node(s), index=0, layers=(0, 1)) for s in plan.stages),
        plan.num_microbatches, plan.schedule, profile,
    )


def _node(stage: Stage) -> str:
    return f"{stage.module}__{stage.index}"
