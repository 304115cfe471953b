"""Who holds which parameters together with whom: what every process is told of it.

Which parameters it sums with whom (replicas, processes that share microbatches, tied embeddings on
two stages), which it counts in the gradient norm, and which it saves: every parameter once. Under
ZeRO-1 the owner of a parameter's optimizer state is the one with the least to update. Buffers are
saved by the stage that has their module's parameters; of replicas, each of which has running
statistics of its own (batch norm), the first one's are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raymm.actors.optimizer.adamw_8bit import BLOCK
from raymm.actors.optimizer.gradient_reduction import (
    ParameterReference,
    ReductionGroup,
    SharedParameter,
)
from raymm.actors.optimizer.optimizer_config import ADAMW_8BIT, OptimizerConfig
from raymm.actors.optimizer.ownership import ParameterOwnership
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId


def parameter_ownership(
    processes: Processes,
    owned: Mapping[StageId, Mapping[str, int]],
    shard_specs: Mapping[str, ShardSpec],
    optimizer: OptimizerConfig | None = None,
) -> tuple[ParameterOwnership, ...]:
    """What each process has of parameters that others have too: tied embeddings, and all of a
    module that has several copies, shares out microbatches, or has fewer shards than processes.

    Args:
        processes: the plan's.
        owned: elements to update of the parameters that each stage of the plan owns, by name.
        shard_specs: per module.
        optimizer: that updates the parameters. Where processes that share one have to agree on its
            moments, all of them update it.
    """
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
    """All groups of several processes, in one order: their process groups are made together."""
    # All holders of a parameter are told of it by the same object: each is looked at once.
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
    """Holders whose gradients add up, in an order that follows from the plan, and whether no
    group before has the very same shard."""
    plan = processes.plan
    places: dict[tuple[str, str, tuple[int, ...]], list[ParameterReference]] = {}
    for stage in plan.topological_stages:
        shard_spec = shard_specs[stage.module]
        for name in owned[stage.id]:
            for number in processes.of_rank(stage.rank):
                place = place_of(processes, number, shard_spec)
                key = (stage.module, name, shard_spec.sharers(name, place))
                places.setdefault(key, []).append(ParameterReference(number, stage.id, name))
    # Of fully sharded modules: what is not sharded.
    sharded = {stage.module for stage in plan.stages if stage.sharding != "none"}
    loads: dict[int, int] = {}
    groups = []
    for (module, name, _), references in places.items():
        group = SharedParameter(tuple(references))
        size = owned[references[0].stage][name]
        agree = optimizer.rule_of(module, name).name == ADAMW_8BIT and (
            shard_specs[module].splits_blocks(name, size, BLOCK)
        )
        if module in sharded and len(group.reduction_group.processes) > 1 and not agree:
            group = replace(group, owner=_lightest(group, loads, size))
        place = place_of(processes, references[0].process, shard_specs[module])
        groups.append((group, not shard_specs[module].is_replica(name, place)))
    return groups


def place_of(processes: Processes, number: int, shard_spec: ShardSpec) -> int:
    """A process's place among those that share a module's parameters.

    Args:
        processes: of the run.
        number: the process's.
        shard_spec: how its module is sharded.
        shard_spec: how its module is sharded.
    """
    process = processes.all[number]
    return shard_spec.place(process.tp, processes.data_place(process))


def _lightest(group: SharedParameter, loads: dict[int, int], size: int) -> int:
    """The holder that has least to update so far."""
    owner = min(
        group.reduction_group.processes, key=lambda process: (loads.get(process, 0), process)
    )
    loads[owner] = loads.get(owner, 0) + size
    return owner
