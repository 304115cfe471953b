"""Conversion of a mapping to a plan with modules in slots, whose replicas split every microbatch by
samples."""

from __future__ import annotations

from collections.abc import Mapping as ByName

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedules.slots import Slots


def mapped_plan(graph: ModuleGraph, mapping: Mapping, num_microbatches: int = 1) -> Plan:
    """Return the plan that runs a mapping, with ``num_microbatches`` per step, one after another.

    Its ranks are the GPUs that the mapping uses, in their order. Losses without a placement run
    after the last stage, on the GPUs of the last module that they read.

    Raises:
        PlanError: sliced modules (slices are for comparisons of mappings only); a module is
            unknown, placed twice or missing, or runs no later than a module that it reads.
    """
    if mapping.slices > 1:
        raise PlanError(
            f"slices is {mapping.slices}; only mappings with slices = 1 (whole modules) can run"
        )
    names = graph.topological
    ranks = {
        gpu: rank for rank, gpu in enumerate(sorted(
            {gpu for stage in mapping.stages for p in stage.placements for gpu in p.gpus}
        ))
    }
    placed: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for s, stage in enumerate(mapping.stages):
        for p, placement in enumerate(stage.placements):
            field = f"stages[{s}].placements[{p}].module is {placement.module!r}"
            if placement.module not in names:
                raise PlanError(f"{field}; accepted: {', '.join(sorted(names))}")
            if placement.module in placed:
                raise PlanError(f"{field}, which is already complete; a module runs once")
            placed[placement.module] = s, placement.gpus, placement.quota
    _place_losses(graph, mapping, placed)
    stages = []
    for name in names:
        slot, gpus, quota = placed[name]
        share = None if quota == mapping.steps else quota / mapping.steps
        layers = 0, graph.node(name).num_layers
        stages += [
            Stage(name, 0, layers, ranks[gpu], replica, quota=share, split=SAMPLES, slot=slot)
            for replica, gpu in enumerate(gpus)
        ]
    return Plan(graph, tuple(stages), num_microbatches, Slots.name)


def _place_losses(
    graph: ModuleGraph, mapping: Mapping, places: dict[str, tuple[int, tuple[int, ...], int]]
) -> None:
    """Place losses without a placement in additional slots, up to one per quota step of a GPU."""
    unplaced = [name for name in graph.topological if name not in places]
    for name in unplaced:
        if name not in graph.losses:
            raise PlanError(f"stages do not have module {name!r}; every module must run")
        if not graph.producers(name):
            raise PlanError(
                f"loss {name!r} reads no module; the mapping must place it explicitly"
            )
    for first in range(0, len(unplaced), mapping.steps):
        concurrent = unplaced[first : first + mapping.steps]
        gpus_of = {name: _last_gpus(graph, places, name) for name in concurrent}
        slot = len(mapping.stages) + first // mapping.steps
        for name, gpus in gpus_of.items():
            sharers = max(sum(gpu in loss_gpus for loss_gpus in gpus_of.values()) for gpu in gpus)
            places[name] = slot, gpus, mapping.steps // sharers


def _last_gpus(
    graph: ModuleGraph, places: ByName[str, tuple[int, tuple[int, ...], int]], name: str
) -> tuple[int, ...]:
    _, gpus, _ = max(places[producer] for producer in graph.producers(name))
    return gpus
