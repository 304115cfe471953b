"""Actor of one rank: its stages, channels, optimizer, one call per step, and its checkpoint."""

from __future__ import annotations

import gc
import platform
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from raymm.actors.executor.colocation import Colocation, default_backend
from raymm.actors.executor.executor import Executor, Prepared
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.faults.cut import OwnConnections, end_after_timeouts, nccl_error
from raymm.actors.faults.task_tracker import task
from raymm.actors.features.kept_features import FeatureWriter
from raymm.actors.host.gpus import bind_to_gpu_node, check_gpu_node
from raymm.actors.host.memory import HostMemory, available_memory
from raymm.actors.memory.peak_memory import PeakMemory
from raymm.actors.memory.to_device import step_inputs
from raymm.actors.modules.cut import own_buffers
from raymm.actors.modules.precision import cast_frozen, disable_tf32
from raymm.actors.optimizer.averages import AVERAGE_NAME
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    Saved,
    SavingActor,
    ShardFile,
    WrittenCopy,
    copy_tensors,
    stored_shards,
)
from raymm.actors.optimizer.host_staging import HostStaging, SnapshotActor, copy_of, restore
from raymm.actors.optimizer.optimizer import Progress, RankOptimizer
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.rank.connections import Connections
from raymm.actors.rank.rank_spec import RankSpec
from raymm.actors.rank.rendezvous import Rendezvous, RendezvousActor, Timeouts, prepare_nccl
from raymm.actors.rank.step_calls import keep_recent, pack_result, unpack_call
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ParameterPart, ShardSpec
from raymm.errors import ChannelError
from raymm.kernels.choice.choice import KERNEL_CHOICE
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import Instruction, Op

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage


class RankActor(SnapshotActor, SavingActor, RendezvousActor):
    """Actor of one rank. :mod:`raymm.actors.rank.rank_group` wraps it in ``ray.remote``."""

    answers = (*RendezvousActor.answers, "cut")
    hands_over = ("hand_over_snapshot",)
    keeps = ("keep_snapshot",)
    writes = ("write_copy",)

    # Set by :meth:`connect` and :meth:`build`.
    _connections: Connections
    _own_connections: OwnConnections
    _generation = -1  # generation of the connections
    _optimizer: RankOptimizer
    _executor: Executor

    def __init__(self, spec: RankSpec) -> None:
        timeouts = Timeouts.of(spec.timeout_s, spec.nccl_timeout_s)
        super().__init__(spec.rank, spec.device, timeouts)
        self._spec = spec
        self._device = torch.device(spec.device)
        self._staging = HostStaging(self._device)
        self._stages: dict[StageId, EncoderStage | LanguageStage] = {}
        prepare_nccl(self._device)
        disable_tf32()
        self._programs: OrderedDict[str, Prepared] = OrderedDict()
        self._colocation: Colocation | None = None

    def warm_up(self, *specs: RankSpec) -> None:
        """Prepare a spare process: unpickling the specs imports their code, a tensor initializes
        the device."""
        torch.zeros(1, device=self._device)

    def take_place(self, spec: RankSpec) -> None:
        """Turn a spare process into a rank."""
        RankActor.__init__(self, spec)

    @task("meeting the other ranks")
    def connect(self, actors: Mapping[int, Any], generation: int = 0) -> None:
        """Join the group of all processes, and create all groups and channels. ``generation`` is
        the number of earlier rendezvous."""
        # OpenMP's thread count is per thread, and ``__init__`` ran in another thread.
        torch.set_num_threads(self._spec.threads)
        if self._device.type == "cuda":
            check_gpu_node()
            bind_to_gpu_node(self._device)
        KERNEL_CHOICE.use(self._spec.kernels, driven=True)
        self._meet(actors, generation)
        if self._device.type == "cuda":
            end_after_timeouts()

    def _meet(self, actors: Mapping[int, Any], generation: int) -> None:
        spec, connections = self._spec, getattr(self, "_connections", None)
        with self._changing:
            self._own_connections, self._generation = OwnConnections(), generation
        with self._meeting(spec.members, actors, generation):
            rendezvous = Rendezvous(
                self._device, self._store, spec.rank, spec.world_size, self._timeouts
            )
            self._device = rendezvous.device
            if connections is None:
                self._connections = Connections(spec, rendezvous, self.task_tracker)
            else:
                connections.renew(rendezvous, self.task_tracker)

    def cut(self, generation: int) -> None:
        """Shut down all connections of a generation from another thread, so that a step in flight
        fails. Newer connections stay, because the caller did not know of them."""
        with self._changing:
            if generation == self._generation:
                self._failed = True
                self._own_connections.cut()

    @task("leaving a step")
    def leave(self) -> Progress:
        """Drop the state of a failed step, and return how far the parameters are."""
        self._staging.wait()
        self._optimizer.reduction.renew({})
        self._optimizer.hide_averages()
        self._optimizer.observer.restore_statistics()
        self._optimizer.zero_grad()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._optimizer.progress

    @task("meeting the other ranks again")
    def renew(self, actors: Mapping[int, Any], generation: int) -> None:
        """Reconnect to survivors and replacements after :meth:`leave`. Stages, parameters and
        optimizer state are kept; loaded programs are dropped."""
        if dist.is_initialized():  # aborted groups of NCCL are gone already
            dist.destroy_process_group()
        self._meet(actors, generation)
        self._programs.clear()
        if any(isinstance(module, FSDPModule) for stage in self._stages.values()
               for module in stage.modules()):
            # FSDP state is undefined after a failed step, so the stages are rebuilt.
            snapshot = copy_of(self._stages, self._optimizer, self._staging)()
            self.build()
            restore(snapshot, self._stages, self._optimizer)
        else:
            self._optimizer.reduction.renew(self._connections.reductions)
            self._executor = self._new_executor()
        self._failed = False

    @task("building stages")
    def build(
        self, builders: dict[StageId, Callable[[], EncoderStage | LanguageStage]] | None = None
    ) -> dict[StageId, int]:
        """Build the stages, the optimizer, and the streams of modules with quotas; return the
        number of parameters held, per stage. ``builders`` replaces the spec's builders if given."""
        self._programs.clear()
        if self._spec.quotas and self._colocation is None:
            self._colocation = self._new_colocation()
        self._memory = PeakMemory(self._device)
        autocast = self._autocast
        self._stages = {}
        for name, builder in (builders or self._spec.builders).items():
            stage: Any = builder()  # its class determines the type of the shard plans
            shard_spec = self._spec.shard_specs.get(name.module, ShardSpec())
            if self._connections.tensors is not None:
                stage.shard_tensors(shard_spec.plans, self._connections.tensors)
            if self._connections.samples is not None:
                stage.share_samples(self._connections.samples)
            if self._connections.tokens is not None:
                stage.share_tokens(self._connections.tokens)
            if autocast is not None and name.module in self._spec.reloadable:
                cast_frozen(stage, autocast)
            if shard_spec.shards > 1:  # first: the device never holds the whole stage
                assert self._connections.data is not None
                stage.shard_parameters(
                    shard_spec.plans, self._connections.data.group, self._device,
                    None if self._spec.exact_autocast else autocast,
                )
            if (folder := self._spec.features.get(name)) is not None:
                stage.keep_features(FeatureWriter(folder))
            self._stages[name] = stage.to(self._device)
        if self._colocation is not None:
            by_module: dict[str, list[torch.nn.Module]] = {}
            for name, stage in self._stages.items():
                by_module.setdefault(name.module, []).append(stage)
            self._colocation.check(by_module)
        parameters = {
            (stage, name): parameter
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = RankOptimizer(
            self._spec.rank, parameters, self._spec.optimizer, self._spec.parameter_ownership,
            self._connections.reductions, self._device, self._stages.values(),
            self._parts(parameters), self._make_largest, self._spec.seed,
            {
                (stage, name): parameter
                for stage, module in self._stages.items()
                for name, parameter in module.named_parameters()
                if not parameter.requires_grad
            },
        )
        self._executor = self._new_executor()
        return {
            stage: sum(local_part(p).numel() for p in module.parameters())
            for stage, module in self._stages.items()
        }

    def _new_executor(self) -> Executor:
        return Executor(
            self._stages, self._spec.edges, self._connections.senders,
            self._connections.receivers,
            {Op.REDUCE_GRADS: self._reduce_grads, Op.CLIP_GRADS: self._clip, Op.STEP: self._step},
            autocast=self._autocast,
            device=self._device,
            timeout=self._timeouts.wait,
            sum_gradient=None if self._connections.data is None else self._sum_over_data,
            agree=None if self._connections.data is None else self._connections.largest_on_host,
            reduction=self._optimizer.reduction,
            colocation=self._colocation,
            task_tracker=self.task_tracker,
            observer=self._optimizer.observer,
            every=self._spec.every,
            spans=self._spec.spans,
            ports=self._spec.ports,
        )

    @property
    def _autocast(self) -> torch.dtype | None:
        return getattr(torch, self._spec.autocast) if self._spec.autocast else None

    def _new_colocation(self) -> Colocation:
        spec, make = self._spec, self._spec.quota_backend
        backend = default_backend(self._device) if make is None else make()
        return Colocation(spec.quotas, backend, spec.timeout_s)

    def quotas(self) -> str:
        """Return the requested and granted quotas, one line per module; empty without quotas."""
        return "" if self._colocation is None else self._colocation.report()

    def sent_bytes(self) -> dict[Edge, int]:
        """Return the bytes sent so far per edge, without side tensors."""
        senders = self._connections.senders.items()
        return {edge: sender.sent_bytes - sender.sent_side_bytes for edge, sender in senders}

    def _sum_over_data(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self._connections.data is not None
        dist.all_reduce(gradient, group=self._connections.data.group)
        return gradient

    def _reduce_grads(self) -> None:
        self._optimizer.reduction.wait()

    def _clip(self) -> None:
        self._optimizer.clip()

    def _step(self) -> None:
        self._staging.wait()
        self._optimizer.step()

    def _finished(self, result: StepResult) -> StepResult:
        if self._optimizer.stepped:
            update = self._optimizer.finish(self._check_connections)
            return replace(
                result, grad_norm=update.grad_norm, learning_rate=update.learning_rate,
                not_finite=update.not_finite,
            )
        self._check_connections()
        return result

    def _check_connections(self) -> None:
        """Check that no connection was aborted, which raises no error on the host by itself.

        Raises:
            ChannelError: data that the step received may be incomplete.
        """
        reason = "connections were cut" if self._failed else nccl_error()
        if reason:
            raise ChannelError(f"{reason} during the step: data that it received may be incomplete")

    def load_program(
        self, key: str, instructions: Sequence[Instruction], issues: Sequence[Issue],
        bound: int | None = None,
    ) -> None:
        """Compile a program for :meth:`run_step`.

        Args:
            issues: receives and gradient sums, with the instruction before which each starts.
            bound: largest number of messages per edge in flight; None for no limit.
        """
        keep_recent(self._programs, key, self._executor.compile(instructions, issues, bound))

    @task("a step")
    def run_step(
        self,
        key: str,
        meta: StepMeta,
        layout: Sequence[tuple[StageId, int]] = (),
        *inputs: dict[str, Any],
    ) -> StepResult:
        """Run one step of a loaded program.

        Args:
            layout: (stage, microbatch) of each entry of ``inputs``; entries of the same stage and
                microbatch are merged. Inputs are separate arguments, so that Ray resolves
                references.
        """
        with self._unless_failed():
            return self._run_step(key, meta, layout, inputs)

    @contextmanager
    def _unless_failed(self) -> Iterator[None]:
        """Reject steps after a failed one: peers may be gone, and collectives would hang."""
        if self._failed:
            raise ChannelError("connections are cut because an earlier step failed")
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _run_step(
        self, key: str, meta: StepMeta, layout: Sequence[tuple[StageId, int]],
        inputs: Sequence[dict[str, Any]],
    ) -> StepResult:  # fmt: skip
        self._memory.restart()
        per_stage: dict[StageId, list[dict[str, Any] | None]] = {}
        for (stage, microbatch), entries in zip(layout, inputs, strict=True):
            row = per_stage.setdefault(stage, [None] * len(meta.keys))
            row[microbatch] = {**(row[microbatch] or {}), **entries}
        program = self._programs[key]
        keep_recent(self._programs, key, program)
        rows = step_inputs(per_stage, self._device)
        KERNEL_CHOICE.decide(meta.kernels)
        result = self._finished(self._executor.run(program, rows, meta))
        return replace(
            result, peak_bytes=self._memory.bytes(), kernel_seconds=KERNEL_CHOICE.new_seconds()
        )

    def run_packed_step(self, call: bytes, layout: bytes, *inputs: dict[str, Any]) -> bytes:
        """Run :meth:`run_step` with pickled arguments (:mod:`raymm.actors.rank.step_calls`)."""
        return pack_result(self.run_step(*unpack_call(call, layout), *inputs))

    @task("the optimizer's step")
    def run_optimizer_ops(self, ops: Sequence[Op]) -> StepResult:
        """Run collective ops separately, after steps that only accumulated gradients."""
        actions = {
            Op.REDUCE_GRADS: self._reduce_grads, Op.CLIP_GRADS: self._clip, Op.STEP: self._step,
        }
        for op in ops:
            self.task_tracker.enter(Op(op).value)
            actions[Op(op)]()
        return self._finished(StepResult())

    @task("showing averages of parameters")
    def show_averages(self) -> None:
        """Replace parameters by their moving averages until :meth:`hide_averages`."""
        with self._unless_failed():
            self._staging.wait()
            self._optimizer.show_averages()

    def hide_averages(self) -> None:
        self._staging.wait()
        self._optimizer.hide_averages()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @task("reading gradients")
    def gradients(self) -> dict[tuple[StageId, str], torch.Tensor | None]:
        """Return gradients by (stage, name); None for a trainable parameter without a gradient."""
        return self._optimizer.gradients()

    @task("reading parameters")
    def parameters(self, trainable_only: bool = False) -> dict[tuple[StageId, str], torch.Tensor]:
        """Return this process's part of each parameter on the CPU, by (stage, name)."""
        return {
            (stage, name): local_part(parameter.detach()).cpu()
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or not trainable_only
        }

    def not_finite_tensors(self) -> list[str]:
        """Return checkpoint names of parameters and optimizer state with non-finite values, with
        their number."""
        return self._optimizer.not_finite_tensors(self._stages)

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
