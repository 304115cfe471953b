"""Checkpoints and snapshots of a rank's state."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from raymm.actors.faults.task_tracker import task
from raymm.actors.host.memory import HostMemory, available_memory
from raymm.actors.modules.cut import own_buffers
from raymm.actors.optimizer.averages import AVERAGE_NAME
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    ShardFile,
    copy_tensors,
    stored_shards,
)
from raymm.actors.optimizer.checkpoint_writer import Saved, SavingActor, WrittenCopy
from raymm.actors.optimizer.host_staging import HostStaging
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.snapshot import SnapshotActor
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.rank.connections import Connections
from raymm.actors.rank.rank_spec import RankSpec
from raymm.actors.rank.rendezvous import RendezvousActor, Timeouts
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ParameterPart, ShardSpec
from raymm.scheduler.plan.stage import StageId

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage


class StoredRank(SnapshotActor, SavingActor, RendezvousActor):
    """Base class of the rank actor that saves and restores its state."""

    _connections: Connections
    _optimizer: RankOptimizer

    hands_over = ("hand_over_snapshot",)
    keeps = ("keep_snapshot",)

    def __init__(self, spec: RankSpec) -> None:
        timeouts = Timeouts.of(spec.timeout_s, spec.nccl_timeout_s)
        super().__init__(spec.rank, spec.device, timeouts)
        self._spec = spec
        self._device = torch.device(spec.device)
        self._staging = HostStaging(self._device)
        self._stages: dict[StageId, EncoderStage | LanguageStage] = {}

    def _shard(self, stage: StageId, name: str) -> ParameterShard | None:
        """Return the shard of a parameter that this process holds; None for the whole parameter."""
        shard_spec = self._spec.shard_specs.get(stage.module)
        return None if shard_spec is None else shard_spec.shard(name, self._place(shard_spec))

    def _place(self, shard_spec: ShardSpec) -> int:
        """Return the number of this process among those that share a module's parameters."""
        groups = self._connections.tensors, self._connections.data
        tensors, data = (0 if group is None else group.rank for group in groups)
        return shard_spec.place(tensors, data)

    def _parts(
        self, parameters: Mapping[tuple[StageId, str], torch.Tensor]
    ) -> dict[tuple[StageId, str], ParameterPart]:
        shards = {}
        for (stage, name), parameter in parameters.items():
            shard_spec = self._spec.shard_specs.get(stage.module)
            if shard_spec is not None and self._shard(stage, name) is not None:
                position, local = self._place(shard_spec), local_part(parameter.detach())
                shards[stage, name] = shard_spec.part(name, position, local.shape)
        return shards

    def _make_largest(self, key: tuple[StageId, str], tensor: torch.Tensor) -> None:
        """All-reduce a tensor in place to its maximum over the processes that share a parameter."""
        data, tensors = self._connections.data, self._connections.tensors
        if self._spec.shard_specs[key[0].module].shards > 1:
            assert data is not None
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=data.group)
        else:
            assert tensors is not None
            tensors.all_reduce_max(tensor)

    def _named_tensors(self, stage: StageId) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (name, parameter name, tensor) of parameters and persistent buffers. The parameter
        name is empty for a buffer, and the first of the names for a tied parameter."""
        module = self._stages[stage]
        first = {parameter: name for name, parameter in module.named_parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            yield name, first.get(tensor, ""), tensor

    copy_snapshot = task("copying a snapshot")(SnapshotActor.copy_snapshot)
    restore_snapshot = task("going back to a snapshot")(SnapshotActor.restore_snapshot)
    writes = ("write_copy",)
    save = task("saving a checkpoint")(SavingActor.save)
    copy_state = task("copying what is saved")(SavingActor.copy_state)

    def write_copy(self, folder: str) -> WrittenCopy:
        with self.task_tracker.in_thread("writing a checkpoint"):
            return super().write_copy(folder)

    def _files_to_save(self, skip_frozen: frozenset[str]) -> Saved:
        rank, parameter_ownership = self._spec.rank, self._spec.parameter_ownership
        tensors: dict[str, torch.Tensor] = {}
        widened: set[str] = set()  # bf16 weights that the checkpoint stores in the model's fp32
        for stage in self._stages:
            owner = stage.module
            first = min(self._spec.process_groups.rank or (rank,))
            writes_buffers = not stage.replica and rank == first
            buffers = own_buffers(self._stages[stage]) if writes_buffers else frozenset()
            trained = any(p.requires_grad for p in self._stages[stage].parameters())
            for name, parameter, tensor in self._named_tensors(stage):
                writes = (
                    (stage, parameter) in parameter_ownership.saves
                    if parameter
                    else name in buffers
                )
                # Running statistics of trained modules change without having gradients.
                changes = tensor.requires_grad or (not parameter and trained)
                if writes and (changes or owner not in skip_frozen):
                    shard = self._shard(stage, parameter) if parameter else None
                    local = local_part(tensor.detach())
                    # A forward may change buffers, so they are copied on the device at once.
                    stored = dict(
                        stored_shards(
                            f"{owner}/{name}", local if parameter else local.clone(), shard
                        )
                    )
                    tensors.update(stored)
                    if id(tensor) in self._optimizer.in_bf16:
                        widened |= stored.keys()
        state: dict[str, torch.Tensor] = {}
        for (stage, name, key), value in self._optimizer.state_tensors().items():
            if (stage, name) in parameter_ownership.in_grad_norm:
                shard = self._shard(stage, name) if value.dim() else None
                full = f"optimizer/{stage.module}/{name}/{key}"
                state.update(stored_shards(full, value, shard))
        kinds = {"model": tensors, "optimizer": state}
        files = {f"{kind}-rank{rank}.safetensors": saved for kind, saved in kinds.items() if saved}
        return Saved(files, frozenset(widened), self._optimizer.state_is_temporary)

    def host_memory(self) -> HostMemory:
        """Return the node of this process and the host memory that is available to it."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return HostMemory(node, platform.node(), available_memory())

    @task("loading a checkpoint")
    def load(
        self, folder: str, index: dict[str, str], files: dict[str, ShardFile], step: int
    ) -> Loaded:
        """Read parameters, buffers and optimizer state from files that match the manifest's
        ``files``. Return the trainable parameters that no file has, and the names of all tensors
        that were read."""
        self._staging.wait()
        stored = StoredTensors(folder, index, files)
        local_tensors = [
            (f"{stage.module}/{name}", tensor, self._shard(stage, parameter) if parameter else None)
            for stage in self._stages
            for name, parameter, tensor in self._named_tensors(stage)
        ]
        read = stored.read({name: shard for name, _, shard in local_tensors})
        for name, tensor, _ in local_tensors:
            if id(tensor) in self._optimizer.in_bf16 and name in read:
                read[name] = read[name].to(tensor.dtype)
        copy_tensors(
            read, [(name, local_part(tensor.detach())) for name, tensor, _ in local_tensors]
        )
        read_names = list(read)
        state: dict[tuple[StageId, str, str], torch.Tensor] = {}
        keys = stored.optimizer_keys()
        for stage, name in (*self._optimizer.updated, *self._optimizer.frozen):
            base = f"optimizer/{stage.module}/{name}"
            shard = self._shard(stage, name)
            shards = {
                f"{base}/{key}": shard for key in keys.get(base, ())
                if key == AVERAGE_NAME or (stage, name) in self._optimizer.updated
            }
            for full, value in stored.read(shards).items():
                state[stage, name, full.rpartition("/")[2]] = value
                read_names.append(full)
        self._optimizer.load_state_tensors(state, step)
        names = (f"{s.module}/{n}" for s, n in self._optimizer.parameters)
        return Loaded([name for name in names if name not in read], read_names)
