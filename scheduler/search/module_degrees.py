"""How many processes share a module, and plans of one stage per rank whose modules are shared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, has_backward
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Degrees
from raymm.scheduler.schedule.process_costs import process_layers
from raymm.scheduler.search.partition import Ranges

KINDS = ("tp", "cp", "dp")


class ModuleDegrees(NamedTuple):
    """Of a module beside its pipeline: copies, and how each of its ranks is several processes."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sharding: str = "none"

    @property
    def of_rank(self) -> Degrees:
        """Of each rank."""
        return Degrees(self.cp, self.tp)

    @property
    def devices(self) -> int:
        """Devices of one stage, in all copies."""
        return self.dp * self.cp * self.tp

    @property
    def text(self) -> str:
        """E.g. ``"tp 4, dp 2"``; empty if nothing is shared."""
        return ", ".join(f"{kind} {n}" for kind in KINDS if (n := getattr(self, kind)) > 1)


def rank_text(degrees: Degrees) -> str:
    """How a rank is several processes, e.g. ``"tp 4, cp 2"``; empty if it is one."""
    order = sorted(degrees._asdict().items(), key=lambda item: (*KINDS, item[0]).index(item[0]))
    return ", ".join(f"{kind} {degree}" for kind, degree in order if degree > 1)


ALONE = ModuleDegrees()
SharedModules = Mapping[str, ModuleDegrees]
"""Degrees by module; nothing is shared of those that are missing."""


def degrees_of(plan: Plan, module: str) -> ModuleDegrees:
    """What a plan says of a module."""
    replicas = plan.replicas(module)
    stage = replicas[0][0]
    return ModuleDegrees(len(replicas), stage.cp, stage.tp, stage.sharding)


@dataclass(frozen=True)
class DegreeChoices:
    """The degrees that a module may have.

    Attributes:
        tp, cp, dp: numbers, in ascending order.

    Raises:
        PlanError: naming what is no number above 0, or empty.
    """

    tp: Sequence[int] = (1,)
    cp: Sequence[int] = (1,)
    dp: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        for kind in KINDS:
            values = getattr(self, kind)
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise PlanError(
                    f"{kind} is {tuple(values)}; it must be whole numbers, each at least 1"
                )

    @property
    def may_be_alone(self) -> bool:
        """Whether the module need not be shared."""
        return all(1 in getattr(self, kind) for kind in KINDS)

    def within(
        self, devices: int, per_node: int, num_microbatches: int, sharding: str
    ) -> Iterator[ModuleDegrees]:
        """Those with which one stage fits on so many devices, tensor parallelism on one node,
        and replicas that divide the microbatches.

        Args:
            devices: that one stage of the module may have.
            per_node: devices of a node.
            num_microbatches: of a step.
            sharding: where several processes share the module; else it is ``"none"``.
        """
        for tp in self.tp:
            if tp > per_node or per_node % tp:
                continue
            for cp in self.cp:
                for dp in self.dp:
                    if dp * cp * tp <= devices and num_microbatches % dp == 0:
                        shared = sharding if dp * cp > 1 else "none"
                        yield ModuleDegrees(dp, cp, tp, shared)


def process_profile(
    graph: ModuleGraph, profile: CostProfile, degrees: SharedModules
) -> CostProfile:
    """The profile as processes see it, wherever they are: those of a rank talk over the fast link
    if a node has room for them.

    Args:
        graph: the modules.
        profile: seconds and bytes of a whole layer on one device.
        degrees: by module, over how many processes it is shared.
    """
    modules = {}
    for node in graph.nodes:
        own = degrees.get(node.name, ALONE)
        links = profile.links
        token_link = tensor_link = None
        if links is not None:
            token_link = links.between(range(own.cp * own.tp))
            tensor_link = links.between(range(own.tp))
        modules[node.name] = process_layers(profile, node, own.of_rank, token_link, tensor_link)
    return replace(profile, modules=modules)


def recomputing(
    graph: ModuleGraph, recompute: bool, recompute_loss: bool = False
) -> dict[str, np.ndarray]:
    """Which stages recompute; arguments as of :func:`make_plan`. Per module of n layers, a
    boolean array of shape (n + 1, n + 1): entry (lo, hi) is of a stage with layers [lo, hi)."""
    result = {}
    for module, backward in has_backward(graph).items():
        # Once a layer has a backward, all after it have.
        first_has_backward = np.array([*backward, False])[:, None]
        again = np.repeat(first_has_backward & recompute, len(backward) + 1, axis=1)
        if module in graph.losses and not recompute_loss:
            again[:, -1] = False
        result[module] = again
    return result


def make_plan(
    graph: ModuleGraph,
    partitions: Mapping[str, Ranges],
    num_microbatches: int,
    schedule: str = "1f1b",
    profile: CostProfile | None = None,
    recompute: bool = False,
    memory_limit: int | None = None,
    recompute_loss: bool = False,
) -> Plan:
    """A plan with one rank per stage ("modality parallel"), encoders first.

    Args:
        graph: the modules.
        partitions: layers of each stage, per module.
        num_microbatches, schedule, profile, memory_limit: as of the plan.
        recompute: recompute in every stage whose layers all have a backward. A stage that
            has none in its first layers keeps what its other layers need: recomputing it
            whole would run forwards again that nothing asks for.
        recompute_loss: recompute in the loss's stage too. It has one microbatch under way at
            a time, whose activations it needs at once, so nothing is gained by it.

    Raises:
        PlanError: if the partitions do not cover the modules.
    """
    recomputed = recomputing(graph, recompute, recompute_loss)
    stages: list[Stage] = []
    for module in graph.topological:
        for index, (lo, hi) in enumerate(partitions.get(module, ())):
            there = 0 <= lo < hi <= graph.node(module).num_layers  # if not, the plan says so
            again = there and bool(recomputed[module][lo, hi])
            stages.append(Stage(module, index, (lo, hi), rank=len(stages), recompute=again))
    return Plan(
        graph, tuple(stages), num_microbatches, schedule, profile, memory_limit=memory_limit
    )


def common_replicas(graph: ModuleGraph, degrees: SharedModules) -> int:
    """The most equal parts that plans with these degrees consist of."""
    return math.gcd(*(degrees.get(node.name, ALONE).dp for node in graph.nodes))


def with_degrees(plan: Plan, degrees: SharedModules, parts: int = 1) -> Plan:
    """A plan of one stage per rank with its modules shared.

    Ranks are numbered so that groups are near each other: those of many processes first, which
    lets tensor parallel groups begin where nodes do; and stage by stage, copies of a stage
    next to each other, because gradients are many more bytes than the messages of a pipeline.

    Args:
        plan: of one replica of each module.
        degrees: by module.
        parts: that the whole plan consists of; of several the first, with the plan's microbatches,
            as an :class:`EqualPart`.
    """
    if all(own == ALONE for own in degrees.values()):
        return plan
    order = {name: at for at, name in enumerate(plan.graph.topological)}

    def of(stage: Stage) -> ModuleDegrees:
        return degrees.get(stage.module, ALONE)

    near = sorted(
        plan.stages, key=lambda s: (-of(s).cp * of(s).tp, order[s.module], s.index)
    )
    copies = [of(stage).dp // parts for stage in near]
    firsts = {s.id: first for s, first in zip(near, accumulate(copies, initial=0), strict=False)}
    stages = tuple(
        replace(
            stage, rank=firsts[stage.id] + copy, replica=copy, cp=of(stage).cp, tp=of(stage).tp,
            sharding=of(stage).sharding,
        )
        for stage in plan.stages
        for copy in range(of(stage).dp // parts)
    )
    plan = replace(plan, stages=stages, shared_ranks=None)
    return plan if parts == 1 else EqualPart.of(plan, parts)
