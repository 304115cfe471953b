"""Degrees of modules, and plans with degrees made from plans with one process per rank."""

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
from raymm.scheduler.schedules.registry import DEFAULT_SCHEDULE, ScheduleChoice, schedule_name
from raymm.scheduler.search.partition import Ranges

KINDS = ("tp", "cp", "dp")


class ModuleDegrees(NamedTuple):
    """Degrees of a module besides its pipeline stages: replicas, and processes per rank."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sharding: str = "none"

    @property
    def of_rank(self) -> Degrees:
        """Degrees of each rank."""
        return Degrees(self.cp, self.tp)

    @property
    def devices(self) -> int:
        """Devices of one stage, over all replicas."""
        return self.dp * self.cp * self.tp

    @property
    def text(self) -> str:
        """Text such as ``"tp 4, dp 2"``; empty without degrees."""
        return ", ".join(f"{kind} {n}" for kind in KINDS if (n := getattr(self, kind)) > 1)


def rank_text(degrees: Degrees) -> str:
    """Return the degrees of a rank, e.g. ``"tp 4, cp 2"``; empty for one process."""
    order = sorted(degrees._asdict().items(), key=lambda item: (*KINDS, item[0]).index(item[0]))
    return ", ".join(f"{kind} {degree}" for kind, degree in order if degree > 1)


ALONE = ModuleDegrees()
SharedModules = Mapping[str, ModuleDegrees]
"""Degrees by module; missing modules have none."""


def degrees_of(plan: Plan, module: str) -> ModuleDegrees:
    """Return the degrees of a module in a plan."""
    replicas = plan.replicas(module)
    stage = replicas[0][0]
    return ModuleDegrees(len(replicas), stage.cp, stage.tp, stage.sharding)


@dataclass(frozen=True)
class DegreeChoices:
    """Accepted degrees of a module, in ascending order. Raises ``PlanError`` if a list is empty
    or a degree is not a whole number above 0."""

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
        """True if the module may have no degrees."""
        return all(1 in getattr(self, kind) for kind in KINDS)

    def within(
        self, devices: int, per_node: int, num_microbatches: int, sharding: str
    ) -> Iterator[ModuleDegrees]:
        """Yield the degrees with which one stage fits on ``devices`` devices, a tensor-parallel
        group on one node, and the replicas divide the microbatches.

        Args:
            devices: most devices of one stage of the module.
            sharding: sharding if several processes hold the same parameters; otherwise ``"none"``.
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
    """Return the profile per process, made from seconds and bytes of whole layers on one device,
    wherever processes are placed: the processes of a rank use the fast link if a node has room for
    them."""
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
    """Return which stages recompute, with arguments as in :func:`make_plan`: per module of n
    layers, an (n + 1, n + 1) bool array, with entry (lo, hi) for a stage with layers [lo, hi)."""
    result = {}
    for module, backward in has_backward(graph).items():
        # If a layer has a backward, all later layers have one.
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
    schedule: ScheduleChoice = DEFAULT_SCHEDULE,
    profile: CostProfile | None = None,
    recompute: bool = False,
    memory_limit: int | None = None,
    recompute_loss: bool = False,
) -> Plan:
    """Return a plan with one rank per stage ("modality parallel"), encoders first.

    Args:
        partitions: layers of each stage, per module.
        num_microbatches, schedule, profile, memory_limit: as in the plan.
        recompute: True to recompute every stage whose layers all have a backward. A stage without a
            backward in its first layers keeps what its other layers need; recomputing all of it
            would run forwards that are not needed.
        recompute_loss: True to recompute the stage of the loss, too. It has one microbatch in
            flight at a time, whose activations it needs at once, so recomputing saves nothing.

    Raises:
        PlanError: the partitions do not cover the modules.
    """
    recomputed = recomputing(graph, recompute, recompute_loss)
    stages: list[Stage] = []
    for module in graph.topological:
        for index, (lo, hi) in enumerate(partitions.get(module, ())):
            there = 0 <= lo < hi <= graph.node(module).num_layers  # otherwise the plan raises
            again = there and bool(recomputed[module][lo, hi])
            stages.append(Stage(module, index, (lo, hi), rank=len(stages), recompute=again))
    return Plan(
        graph, tuple(stages), num_microbatches, schedule_name(schedule), profile,
        memory_limit=memory_limit,
    )


def common_replicas(graph: ModuleGraph, degrees: SharedModules) -> int:
    """Return the largest number of equal parts of plans with these degrees."""
    return math.gcd(*(degrees.get(node.name, ALONE).dp for node in graph.nodes))


def with_degrees(plan: Plan, degrees: SharedModules, parts: int = 1) -> Plan:
    """Return a plan with degrees, made from a plan with one process per rank and one replica of
    each module. With ``parts`` above 1, return the first :class:`EqualPart`, with the plan's
    microbatches.

    Ranks are numbered so that groups are close together. Ranks of many processes come first, so
    that tensor-parallel groups begin where nodes do. Replicas of a stage are adjacent, because
    gradients are much larger than the messages of a pipeline.
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
