"""Host memory that a run needs for copies of the training state and offloaded activations, and a
check that the nodes have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymm.actors.host.memory import CopyOptions, HostMemory
from raymm.actors.optimizer.bf16_parameters import products_of
from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.gradient_reduction import ParameterOwnership
from raymm.actors.optimizer.host_staging import staging_bytes
from raymm.actors.optimizer.optimizer_config import FP32, MASTER, MUON, OptimizerConfig
from raymm.actors.optimizer.updates import matrices_of
from raymm.actors.recovery.snapshots import keepers
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.errors import PlanError
from raymm.layout.parameter_owners import place_of
from raymm.layout.rank_specs import RankSpecs
from raymm.layout.stage_builders import AnySpec, skeletons
from raymm.model.model import Model
from raymm.scheduler.costs.recomputation import KEEP, OFFLOAD
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.stage_costs import stage_costs

GIB = 2**30
# Copies of a snapshot: one that the device writes, and the newest two in Ray's object store.
SNAPSHOTS_TAKEN, SNAPSHOTS_STORED = 1, 2
_BF16_BYTES = 2
_STEP_BYTES = 4  # per parameter, for its step count


class HostNeed(NamedTuple):
    """Bytes of host memory that a process needs.

    Attributes:
        checkpoint: the part of a checkpoint that the process writes.
        snapshot: one snapshot of the state that the process trains.
        pinned: page-locked staging memory for both.
        offloaded: peak of offloaded activations.
    """

    checkpoint: int = 0
    snapshot: int = 0
    pinned: int = 0
    offloaded: int = 0


class NodeNeed(NamedTuple):
    """Bytes of host memory that the processes of a node need.

    Attributes:
        processes: numbers of the processes.
        checkpoints: copies for asynchronous checkpoints.
        snapshots: snapshots of these processes, and those that are stored here for other nodes.
        pinned, offloaded: as in :class:`HostNeed`.
    """

    processes: tuple[int, ...]
    checkpoints: int
    snapshots: int
    pinned: int
    offloaded: int

    @property
    def total(self) -> int:
        return sum(self[1:])


# Purposes of the amounts of a NodeNeed, for errors.
_PURPOSES = (
    "asynchronous checkpoints (run.asynchronous_checkpoints)", "snapshots (run.snapshot_every)",
    "pinned memory", "offloaded activations (recompute_layers)",
)


class ProcessParameters(NamedTuple):
    """Parameters that the processes of a plan hold.

    Attributes:
        specs: by module; their sources give the structure of the module.
        owned: names by stage.
        ownership: by process.
        reloadable: modules whose frozen weights checkpoints do not contain.
    """

    processes: Processes
    specs: Mapping[str, AnySpec]
    shard_specs: Mapping[str, ShardSpec]
    owned: Mapping[StageId, Collection[str]]
    ownership: Sequence[ParameterOwnership]
    reloadable: Collection[str]


class _Sizes(NamedTuple):
    """Bytes of a parameter.

    Attributes:
        stored, held: the values in a checkpoint and on the device.
        state: the optimizer state.
        steps: the part of ``state`` that every shard holds in full.
    """

    stored: int
    held: int
    state: int
    steps: int
    trained: bool


def host_needs(
    ranks: RankSpecs, model: Model, optimizer: OptimizerConfig, copies: CopyOptions, device: str
) -> tuple[HostNeed, ...]:
    """Return the needs of each process once the optimizer has its state, without buffers. Nothing
    is pinned on ``"cpu"``."""
    builders = ranks.builders
    parameters = ProcessParameters(
        ranks.processes, {module: model.spec(module) for module in builders.shard_specs},
        builders.shard_specs, builders.owned, ranks.ownership, model.reloadable(),
    )
    return needs_of(parameters, optimizer, copies, device)


def needs_of(
    parameters: ProcessParameters, optimizer: OptimizerConfig, copies: CopyOptions, device: str
) -> tuple[HostNeed, ...]:
    """Return :func:`host_needs` of known parameters."""
    processes, specs = parameters.processes, parameters.shard_specs
    sizes = {module: _sizes(spec, module, optimizer) for module, spec in parameters.specs.items()}
    offloaded = _offloaded(processes.plan)
    needs = []
    for number, (process, ownership) in enumerate(
        zip(processes.all, parameters.ownership, strict=True)
    ):
        elsewhere = {
            (reference.stage, reference.name)
            for shared in ownership.shared if shared.owner not in (None, number)
            for reference in shared.references if reference.process == number
        }
        checkpoint = snapshot = 0
        for stage in processes.plan.rank_stages(process.rank):
            shard = place_of(processes, number, specs[stage.module])
            for name in parameters.owned[stage.id]:
                size, key = sizes[stage.module][name], (stage.id, name)
                share = _share(specs[stage.module], name, shard)
                state = int(size.state * share) + size.steps * (share > 0)
                if key in ownership.saves and (
                    size.trained or stage.module not in parameters.reloadable
                ):
                    checkpoint += int(size.stored * share)
                if size.trained and key in ownership.in_grad_norm:
                    checkpoint += state
                if size.trained:
                    snapshot += int(size.held * share) + state * (key not in elsewhere)
        checkpoint, snapshot = checkpoint * copies.checkpoints, snapshot * copies.snapshots
        pinned = staging_bytes(max(checkpoint, snapshot)) if device == "cuda" else 0
        needs.append(HostNeed(checkpoint, snapshot, pinned, offloaded[process.rank]))
    return tuple(needs)


def offloads(plan: Plan) -> bool:
    """Return True if a layer of the plan offloads its activations."""
    return any(OFFLOAD in stage.layer_options for stage in plan.stages)


def _offloaded(plan: Plan) -> tuple[int, ...]:
    """Return the peak bytes that each rank's processes offload; 0 if the plan has no profile."""
    if plan.profile is None or not offloads(plan):
        return (0,) * plan.num_ranks
    kept = replace(plan, stages=tuple(
        replace(stage, layer_options=tuple(
            KEEP if option == OFFLOAD else option for option in stage.layer_options
        ))
        for stage in plan.stages
    ))
    complete = stage_costs(kept)
    moved = {
        stage: replace(
            cost, activation_bytes=complete[stage].activation_bytes - cost.activation_bytes,
            input_bytes=0, remade_bytes=0,
        )
        for stage, cost in stage_costs(plan).items()
    }
    return activation_peaks(full_program(plan), moved, group_spans(plan))


def node_needs(needs: Sequence[HostNeed], nodes: Sequence[str]) -> dict[str, NodeNeed]:
    """Return the needs of each node. ``needs`` and ``nodes`` are by process."""
    by_node: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        by_node.setdefault(node, []).append(number)
    snapshots = dict.fromkeys(by_node, 0)
    keeper_of = keepers(dict(enumerate(nodes)))
    for number, need in enumerate(needs):
        snapshots[nodes[number]] += need.snapshot * (SNAPSHOTS_TAKEN + SNAPSHOTS_STORED)
        if number in keeper_of:
            snapshots[nodes[keeper_of[number]]] += need.snapshot * SNAPSHOTS_STORED
    return {
        node: NodeNeed(
            tuple(local), sum(needs[number].checkpoint for number in local), snapshots[node],
            sum(needs[number].pinned for number in local),
            sum(needs[number].offloaded for number in local),
        )
        for node, local in by_node.items()
    }


def check_hosts(needs: Sequence[HostNeed], hosts: Sequence[HostMemory]) -> None:
    """Raise a PlanError, which has the amounts, if a node lacks host memory for its processes.
    ``needs`` and ``hosts`` are by process."""
    for need in node_needs(needs, [host.node for host in hosts]).values():
        host = min((hosts[number] for number in need.processes), key=lambda host: host.available)
        if need.total > host.available:
            amounts = zip(need[1:], _PURPOSES, strict=True)
            shown = ", ".join(f"{_size(size)} of {name}" for size, name in amounts if size)
            numbers = ", ".join(map(str, need.processes))
            raise PlanError(
                f"processes {numbers} on {host.name} need {_size(need.total)} of host memory: "
                f"{shown}; {_size(host.available)} are available. Turn one of these off "
                "(asynchronous_checkpoints: false, snapshot_every: null, recompute_layers without "
                "offload), or use more nodes"
            )


def _sizes(spec: AnySpec, module: str, optimizer: OptimizerConfig) -> Mapping[str, _Sizes]:
    """Return the sizes of a module's parameters and its projector's, by name."""
    sizes = {}
    for prefix, skeleton in skeletons(spec).items():
        matrices, products = matrices_of([skeleton]), products_of([skeleton])
        # Copies contain a tied parameter once per name.
        names = Counter(id(p) for _, p in skeleton.named_parameters(remove_duplicate=False))
        for parameter_name, parameter in skeleton.named_parameters():
            name = f"{prefix}.{parameter_name}"
            rule = optimizer.rule_of(module, name)
            halved = rule.parameters != FP32 and id(parameter) in products
            scalars = int(rule.name != MUON or id(parameter) not in matrices)
            tensors = 1.0 + scalars
            if rule.is_custom:
                _, tensors, scalars = optimizer_traits("optimizer.name", rule)
            tensors += optimizer.ema is not None
            tensors += halved and rule.parameters == MASTER
            elements, width = parameter.numel(), parameter.element_size()
            named = elements * names[id(parameter)]
            sizes[name] = _Sizes(
                named * width, named * (_BF16_BYTES if halved else width),
                int(elements * width * tensors), _STEP_BYTES * scalars, parameter.requires_grad,
            )
    return sizes


def _share(spec: ShardSpec, name: str, place: int) -> float:
    """Return the fraction of a parameter that a process holds."""
    shard, length = spec.shard(name, place), spec.length(name)
    if shard is None or length is None:
        return 1.0
    return sum(stop - start for start, stop in shard.ranges) / length


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 100 else f"{count:,} bytes"
