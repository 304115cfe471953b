"""Checks that a plan fits its model and its devices, before anything starts."""

from __future__ import annotations

from dataclasses import replace

from raymm.actors.quota import Multiprocessors, partition
from raymm.errors import PlanError
from raymm.plural import plural
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import check_memory
from raymm.scheduler.schedules.registry import find_schedule


def check_fits(plan: Plan) -> None:
    """Raise a PlanError if the order of a custom schedule cannot run, or a rank needs more memory
    than the plan's limit."""
    has_limit = plan.memory_limit is not None and plan.profile is not None
    if has_limit or not find_schedule(plan.schedule).proven:
        check_memory(plan, full_program(plan))


def check_grants(plan: Plan, gpu: Multiprocessors) -> None:
    """Raise a PlanError if the device cannot partition its multiprocessors into the quotas of a
    rank: a quota is below the granularity, or there are too many."""
    for rank in range(plan.num_ranks):
        try:
            for quotas in plan.quota_sets(rank):
                partition(quotas, gpu)
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from None


def differences(planned: ModuleGraph, model: ModuleGraph) -> list[str]:
    """Return the differences between a plan's graph and a model's as texts; empty if they are
    equal."""
    texts = []
    nodes = {node.name: node for node in planned.nodes}
    model_nodes = {node.name: node for node in model.nodes}
    for name in sorted(nodes.keys() - model_nodes.keys()):
        texts.append(f"the plan has a module {name!r}, the model does not")
    for name in sorted(model_nodes.keys() - nodes.keys()):
        texts.append(f"the model has a module {name!r}, the plan does not")
    for name, node in model_nodes.items():
        if name not in nodes:
            continue
        in_plan = nodes[name]
        if in_plan.num_blocks != node.num_blocks:
            texts.append(
                f"{name!r} has {plural(in_plan.num_blocks, 'block')} in the plan, "
                f"{node.num_blocks} in the "
                "model"
            )
        elif in_plan.projector != node.projector:
            where = "plan" if in_plan.projector else "model"
            texts.append(f"{name!r} has a projector in the {where} only")
        elif in_plan.trainable != node.trainable:
            layer = next(
                i for i, (a, b) in enumerate(zip(in_plan.trainable, node.trainable, strict=True))
                if a != b
            )
            states = ("frozen", "trained")
            texts.append(
                f"layer {layer} of {name!r} is {states[in_plan.trainable[layer]]} in the plan, "
                f"{states[node.trainable[layer]]} in the model"
            )
    if not texts and set(planned.edges) != set(model.edges):
        texts.append(f"the plan's edges are {planned.edges}, the model's {model.edges}")
    if not texts and model.ports and planned.ports != model.ports:
        texts.append(f"layers read {planned.ports} in the plan, {model.ports} in the model")
    if not texts and replace(planned, ports=()) != replace(model, ports=()):
        texts.append("modules or edges are in another order")
    return texts
