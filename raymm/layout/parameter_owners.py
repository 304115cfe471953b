"""Parameter ownership: which processes reduce, count and save each parameter.

Gradients are reduced over replicas, over processes that share microbatches, and between two stages
with tied embeddings. The gradient norm counts every parameter once, and so does a checkpoint. Under
ZeRO-1 the optimizer state of a parameter belongs to the process with the least to update. Buffers
are saved by the stage of their module's parameters; of replicas with separate running statistics
(batch norm), those of the first are saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raymm.actors.optimizer.adamw_8bit import BLOCK
from raymm.actors.optimizer.gradient_reduction import (
    ParameterOwnership,
    ParameterReference,
    ReductionGroup,
    SharedParameter,
)
from raymm.actors.optimizer.optimizer_config import ADAMW_8BIT, OptimizerConfig
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId


def parameter_ownership(
    processes: Processes,
    owned: Mapping[StageId, Mapping[str, int]],
    shard_specs: Mapping[str, ShardSpec],
    optimizer: OptimizerConfig | None = None,
) -> tuple[ParameterOwnership, ...]:
    """Return the ownership of each process. ``owned`` has the elements to update by stage and
    parameter. If holders of a parameter must agree on its 8-bit moments, all of them update it."""
    groups = _groups(processes, owned, shard_specs, optimizer or OptimizerConfig())
    shared: list[list[SharedParameter]] = [[] for _ in processes.all]
    in_grad_norm: list[set[tuple[StageId, str]]] = [set() for _ in processes.all]
    saves: list[set[tuple[StageId, str]]] = [set() for _ in processes.all]
    for group, is_first in groups:
        if len(group.references) > 1:
            for process in group.reduction_group.processes:
                shared[process].append(group)
        if is_first:
            process, stage, name = next(iter(group.references))
            saves[process].add((stage, name))
            if group.owner is not None:
                process, stage, name = next(r for r in group.references if r.process == group.owner)
            in_grad_norm[process].add((stage, name))
    return tuple(
        ParameterOwnership(tuple(s), frozenset(c), frozenset(w))
        for s, c, w in zip(shared, in_grad_norm, saves, strict=True)
    )


def reduction_groups(every: Sequence[ParameterOwnership]) -> tuple[ReductionGroup, ...]:
    """Return all groups of several processes in a fixed order, in which they are created
    together."""
    # All holders of a parameter refer to the same object, so each is visited once.
    shared = {id(parameter): parameter for holding in every for parameter in holding.shared}
    groups = {parameter.reduction_group for parameter in shared.values()}
    return tuple(
        sorted(reduction_group for reduction_group in groups if len(reduction_group.processes) > 1)
    )


def _groups(
    processes: Processes,
    owned: Mapping[StageId, Mapping[str, int]],
    shard_specs: Mapping[str, ShardSpec],
    optimizer: OptimizerConfig,
) -> list[tuple[SharedParameter, bool]]:
    """Return the parameters with their holders, in an order that follows from the plan, and whether
    each is the first group with its shard."""
    plan = processes.plan
    holders: dict[tuple[str, str, tuple[int, ...]], list[ParameterReference]] = {}
    for stage in plan.topological_stages:
        shard_spec = shard_specs[stage.module]
        for name in owned[stage.id]:
            for number in processes.of_rank(stage.rank):
                shard = place_of(processes, number, shard_spec)
                key = (stage.module, name, shard_spec.sharers(name, shard))
                holders.setdefault(key, []).append(ParameterReference(number, stage.id, name))
    # In fully sharded modules, this concerns the parameters that stay replicated.
    sharded = {stage.module for stage in plan.stages if stage.sharding != "none"}
    loads: dict[int, int] = {}
    groups = []
    for (module, name, _), references in holders.items():
        group = SharedParameter(tuple(references))
        size = owned[references[0].stage][name]
        agree = optimizer.rule_of(module, name).name == ADAMW_8BIT and (
            shard_specs[module].splits_blocks(name, size, BLOCK)
        )
        if module in sharded and len(group.reduction_group.processes) > 1 and not agree:
            group = replace(group, owner=_lightest(group, loads, size))
        shard = place_of(processes, references[0].process, shard_specs[module])
        groups.append((group, not shard_specs[module].is_replica(name, shard)))
    return groups


def place_of(processes: Processes, number: int, shard_spec: ShardSpec) -> int:
    """Return a process's index among those that share a module's parameters."""
    process = processes.all[number]
    return shard_spec.place(process.tp, processes.data_place(process))


def _lightest(group: SharedParameter, loads: dict[int, int], size: int) -> int:
    owner = min(
        group.reduction_group.processes, key=lambda process: (loads.get(process, 0), process)
    )
    loads[owner] = loads.get(owner, 0) + size
    return owner
