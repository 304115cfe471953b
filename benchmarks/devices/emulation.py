"""Mapping problems as models that sleep, to run plans on actors without GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from benchmarks.devices.emulated_gpu import EmulatedGpu, EmulatedNode, Slice
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.plan.plan import Plan

# Entry of the batch that modules without a producer read, (samples, W).
ENTRY = "x"


@dataclass(frozen=True)
class Emulation:
    """Arguments for :class:`raymm.ParallelModel`.

    Attributes:
        dag: nodes that sleep. Nodes without a consumer are losses.
    """

    dag: ModuleDag
    mapping: Mapping
    backend: EmulatedGpu

    @property
    def plan(self) -> Plan:
        """Return the mapping's plan.

        A stage alone on its GPU has all of it as a quota, because nodes sleep on streams, which
        identify the module.
        """
        mapped = plan_of_mapping(self.dag, self.mapping)
        return replace(mapped, stages=tuple(
            replace(stage, quota=stage.quota or 1.0) for stage in mapped.stages
        ))


def emulate(
    problem: MappingProblem, mapping: Mapping, contrastive: Collection[str] = ()
) -> Emulation:
    """Emulate a problem's modules under a mapping.

    Slices of a module's work become separate, consecutive nodes, as Spindle does with a module's
    layers.

    Args:
        problem: modules, their times, and dependencies.
        contrastive: modules that read every sample of their producers.
    """
    whole, parts, degrees, slices = _whole_slices(mapping)
    edges = [(parts[a][-1], parts[b][0]) for a, b in problem.edges]
    for names in parts.values():
        edges += zip(names, names[1:], strict=False)
    read = {producer for producer, _ in edges}
    nodes: dict[str, DagModule] = {}
    for module, names in parts.items():
        for name in names:
            producers = [a for a, b in edges if b == name]
            compares = module in contrastive and name == names[0]
            kind = DagModule if name in read else DagLoss
            nodes[name] = kind(
                EmulatedNode(degrees[name], name not in read),
                inputs={p: every(p) if compares else p for p in producers},
                reads=() if producers else ENTRY, draws=False,
            )
    return Emulation(ModuleDag(nodes), whole, EmulatedGpu(problem, slices))


def _whole_slices(
    mapping: Mapping,
) -> tuple[Mapping, dict[str, list[str]], dict[str, int], dict[str, Slice]]:
    """Return a mapping of slices, the ordered slices of every module, and degree and share of each.
    """
    parts: dict[str, list[str]] = {}
    degrees: dict[str, int] = {}
    slices: dict[str, Slice] = {}
    stages = []
    for stage in mapping.stages:
        placements = []
        for one in stage.placements:
            names = parts.setdefault(one.module, [])
            name = f"{one.module}__{len(names)}" if mapping.slices > 1 else one.module
            names.append(name)
            degrees[name] = len(one.gpus)
            slices[name] = Slice(one.module, one.slices / mapping.slices)
            placements.append(replace(one, module=name, slices=1))
        stages.append(MultiplexStage(tuple(placements), stage.seconds))
    whole = replace(mapping, stages=tuple(stages), slices=1, bound=0.0)
    return whole, parts, degrees, slices
