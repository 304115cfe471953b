"""A mapping problem as a model that sleeps: plans run on actors without GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raymm.actors.multiplexed.emulated import EmulatedNode
from raymm.module_dag import DagLoss, DagModule, ModuleDag, every
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem

# The batch's entry that modules without a producer read, (samples, W).
ENTRY = "x"


def emulated_dag(
    problem: MappingProblem, mapping: Mapping, contrastive: Collection[str] = ()
) -> ModuleDag:
    """Every module of the problem as a node that sleeps; modules that nothing reads are losses.

    Args:
        problem: modules and dependencies.
        mapping: of whole modules; see :func:`whole_slices` for others.
        contrastive: modules that read every sample of their producers.
    """
    degree = {p.module: len(p.gpus) for stage in mapping.stages for p in stage.placements}
    read = {producer for producer, _ in problem.edges}
    nodes: dict[str, DagModule] = {}
    for name in problem.names:
        producers = [a for a, b in problem.edges if b == name]
        inputs = {p: every(p) if name in contrastive else p for p in producers}
        kind = DagModule if name in read else DagLoss
        nodes[name] = kind(
            EmulatedNode(degree[name], name not in read), inputs=inputs,
            reads=() if producers else ENTRY, draws=False,
        )
    return ModuleDag(nodes)


def whole_slices(problem: MappingProblem, mapping: Mapping) -> tuple[MappingProblem, Mapping]:
    """Slices of a module's work as modules of their own, one after the other: what Spindle does
    with a module's layers. The seconds of every stage stay what they are."""
    if mapping.slices == 1:
        return problem, mapping
    surfaces = {surface.name: surface for surface in problem.surfaces}
    parts: dict[str, list[str]] = {name: [] for name in problem.names}
    found, stages = [], []
    for stage in mapping.stages:
        placements = []
        for one in stage.placements:
            name = f"{one.module}__{len(parts[one.module])}"
            parts[one.module].append(name)
            surface, share = surfaces[one.module], one.slices / mapping.slices
            seconds = tuple(tuple(s * share for s in row) for row in surface.seconds)
            found.append(replace(surface, name=name, seconds=seconds))
            placements.append(replace(one, module=name, slices=1))
        stages.append(MultiplexStage(tuple(placements), stage.seconds))
    edges = [(parts[a][-1], parts[b][0]) for a, b in problem.edges]
    for names in parts.values():
        edges += zip(names, names[1:], strict=False)
    return (
        replace(problem, surfaces=tuple(found), edges=tuple(edges)),
        replace(mapping, stages=tuple(stages), slices=1, bound=0.0),
    )
