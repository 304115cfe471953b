"""Host memory that copies of the training state need, and a check that the nodes have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raymm.actors.host.memory import CopyOptions, HostMemory
from raymm.actors.optimizer.bf16_parameters import products_of
from raymm.actors.optimizer.host_staging import staging_bytes
from raymm.actors.optimizer.optimizer_config import FP32, MASTER, MUON, OptimizerConfig
from raymm.actors.optimizer.updates import matrices_of
from raymm.actors.recovery.snapshots import keepers
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.errors import PlanError
from raymm.layout.parameter_owners import place_of
from raymm.layout.rank_specs import RankSpecs
from raymm.layout.stage_builders import skeletons

GIB = 2**30
# Copies of a snapshot: one that the device writes, and the newest two in Ray's object store.
SNAPSHOTS_TAKEN, SNAPSHOTS_STORED = 1, 2
_BF16_BYTES = 2
_STEP_BYTES = 4  # per parameter, for its step count


class HostNeed(NamedTuple):
    """Bytes of host memory that a process needs for copies.

    Attributes:
        checkpoint: the part of a checkpoint that the process writes.
        snapshot: one snapshot of the state that the process trains.
        pinned: page-locked staging memory for both.
    """

    checkpoint: int = 0
    snapshot: int = 0
    pinned: int = 0


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
    ranks: RankSpecs, model: Any, optimizer: OptimizerConfig, copies: CopyOptions, device: str
) -> tuple[HostNeed, ...]:
    """Return the needs of each process once the optimizer has its state, without buffers. Nothing
    is pinned on ``"cpu"``."""
    specs = ranks.builders.shard_specs
    sizes = {
        module: _sizes(model, module, optimizer)
        for module in {stage.module for stage in ranks.builders.owned}
    }
    needs = []
    for process, spec, ownership in zip(
        ranks.processes.all, ranks.specs, ranks.ownership, strict=True
    ):
        number = spec.rank
        elsewhere = {
            (reference.stage, reference.name)
            for shared in ownership.shared if shared.owner not in (None, number)
            for reference in shared.references if reference.process == number
        }
        checkpoint = snapshot = 0
        for stage in ranks.processes.plan.rank_stages(process.rank):
            shard = place_of(ranks.processes, number, specs[stage.module])
            for name in ranks.builders.owned[stage.id]:
                size, key = sizes[stage.module][name], (stage.id, name)
                share = _share(specs[stage.module], name, shard)
                state = int(size.state * share) + size.steps * (share > 0)
                if key in ownership.saves and (
                    size.trained or stage.module not in spec.reloadable
                ):
                    checkpoint += int(size.stored * share)
                if size.trained and key in ownership.in_grad_norm:
                    checkpoint += state
                if size.trained:
                    snapshot += int(size.held * share) + state * (key not in elsewhere)
        checkpoint, snapshot = checkpoint * copies.checkpoints, snapshot * copies.snapshots
        pinned = staging_bytes(max(checkpoint, snapshot)) if device == "cuda" else 0
        needs.append(HostNeed(checkpoint, snapshot, pinned))
    return tuple(needs)


def check_hosts(needs: Sequence[HostNeed], hosts: Sequence[HostMemory]) -> None:
    """Raise a PlanError, which has the amounts, if a node lacks host memory for the copies of its
    processes. ``needs`` and ``hosts`` are by process."""
    kept_by: dict[int, list[int]] = {}
    for process, keeper in keepers({n: host.node for n, host in enumerate(hosts)}).items():
        kept_by.setdefault(keeper, []).append(process)
    for node in dict.fromkeys(host.node for host in hosts):
        local = [number for number, host in enumerate(hosts) if host.node == node]
        stored_here = [process for number in local for process in kept_by.get(number, ())]
        amounts = {
            "asynchronous checkpoints (run.asynchronous_checkpoints)": sum(
                needs[number].checkpoint for number in local
            ),
            "snapshots (run.snapshot_every)": sum(
                needs[number].snapshot * (SNAPSHOTS_TAKEN + SNAPSHOTS_STORED) for number in local
            ) + sum(needs[number].snapshot * SNAPSHOTS_STORED for number in stored_here),
            "pinned memory": sum(needs[number].pinned for number in local),
        }
        host = min((hosts[number] for number in local), key=lambda host: host.available)
        if (total := sum(amounts.values())) > host.available:
            shown = ", ".join(f"{_size(size)} of {name}" for name, size in amounts.items() if size)
            numbers = ", ".join(map(str, local))
            raise PlanError(
                f"processes {numbers} on {host.name} need {_size(total)} of host memory for copies "
                f"of the training state: {shown}; {_size(host.available)} are available. Turn one "
                "of these off (asynchronous_checkpoints: false, snapshot_every: null), or use more "
                "nodes"
            )


def _sizes(model: Any, module: str, optimizer: OptimizerConfig) -> Mapping[str, _Sizes]:
    """Return the sizes of a module's parameters and its projector's, by name."""
    sizes = {}
    spec = model.spec(module)
    for prefix, skeleton in skeletons(spec).items():
        matrices, products = matrices_of([skeleton]), products_of([skeleton])
        # Copies contain a tied parameter once per name.
        names = Counter(id(p) for _, p in skeleton.named_parameters(remove_duplicate=False))
        for parameter_name, parameter in skeleton.named_parameters():
            name = f"{prefix}.{parameter_name}"
            rule = optimizer.rule_of(module, name)
            halved = rule.parameters != FP32 and id(parameter) in products
            has_steps = rule.name != MUON or id(parameter) not in matrices
            tensors = 1 + has_steps + (optimizer.ema is not None)
            tensors += halved and rule.parameters == MASTER
            elements, width = parameter.numel(), parameter.element_size()
            named = elements * names[id(parameter)]
            sizes[name] = _Sizes(
                named * width, named * (_BF16_BYTES if halved else width),
                elements * width * tensors, _STEP_BYTES * has_steps, parameter.requires_grad,
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
