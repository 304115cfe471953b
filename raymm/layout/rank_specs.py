"""Specs that the processes of a plan build themselves from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.optimizer.gradient_reduction import ParameterOwnership
from raymm.actors.rank.rank_spec import ProcessGroups, RankSpec, connection_plans
from raymm.layout.parameter_owners import parameter_ownership, reduction_groups
from raymm.layout.stage_builders import StageBuilders, stage_builders
from raymm.model.model import Model
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.port_routes import sent_ports
from raymm.scheduler.plan.process_grid import Process, Processes
from raymm.scheduler.plan.stage import Edge, StageId


@dataclass(frozen=True)
class RankSpecs:
    """The processes of a plan.

    Attributes:
        specs: one per process, by number.
        ownership: parameters that each process shares with others.
    """

    specs: tuple[RankSpec, ...]
    processes: Processes
    builders: StageBuilders
    ownership: tuple[ParameterOwnership, ...]


def rank_specs(
    model: Model, plan: Plan,
    features: Mapping[str, FeatureFolder] | None = None, compiled: bool = False, **options: Any,
) -> RankSpecs:
    """Return the specs of a plan's processes. Needs neither Ray nor a process group.

    Args:
        features: folders by encoder whose features are cached.
        compiled: True to compile blocks.
        **options: further fields of :class:`raymm.actors.rank.rank_spec.RankSpec`: optimizer,
            autocast, device, threads.

    Raises:
        ProbeError: a module cannot be cut or sharded as planned.
        PlanError: the model's sizes do not fit the plan's degrees.
    """
    builders = stage_builders(model, plan, features or (), compiled)
    processes = Processes(plan)
    ownership = parameter_ownership(
        processes, builders.owned, builders.shard_specs, options.get("optimizer")
    )
    connections = connection_plans(
        len(processes.all), [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges],
        processes.groups, reduction_groups(ownership),
    )  # fmt: skip
    ports = sent_ports(plan.edge_ports, lambda stage: plan.by_id[stage].rank)
    edges: list[dict[Edge, None]] = [{} for _ in range(plan.num_ranks)]
    for edge in plan.stage_edges:
        for stage in edge:
            edges[plan.by_id[stage].rank][edge] = None
    reloadable = model.reloadable()
    specs = tuple(
        RankSpec(
            rank=number,
            world_size=len(processes.all),
            builders={s.id: builders.build[s.id] for s in plan.rank_stages(process.rank)},
            edges=tuple(edges[process.rank]),
            every=plan.graph.every,
            spans=group_spans(plan),
            ports={edge: ports[edge] for edge in edges[process.rank] if edge in ports},
            connections=connections[number],
            process_groups=_process_groups(processes, process),
            shard_specs=builders.shard_specs,
            parameter_ownership=ownership[number],
            reloadable=reloadable,
            quotas=plan.quota_sets(process.rank),
            features=_written(plan, process, features or {}),
            **options,
        )
        for number, process in enumerate(processes.all)
    )
    return RankSpecs(specs, processes, builders, ownership)


def _written(
    plan: Plan, process: Process, features: Mapping[str, FeatureFolder]
) -> dict[StageId, FeatureFolder]:
    """Return the feature folders that a process writes; only the first process of a rank does."""
    if process.tp or process.cp or process.fsdp:
        return {}
    return {
        stage.id: replace(folder, room=folder.room // len(plan.replicas(stage.module)))
        for stage in plan.rank_stages(process.rank)
        if (folder := features.get(stage.module)) is not None and stage.index == 0
    }


def _process_groups(processes: Processes, process: Process) -> ProcessGroups:
    groups = (
        tuple(processes.of_rank(process.rank)),
        processes.data_group(process),
        processes.sample_group(process),
        processes.token_group(process),
        processes.tensor_group(process),
    )
    return ProcessGroups(*(group if len(group) > 1 else () for group in groups))
