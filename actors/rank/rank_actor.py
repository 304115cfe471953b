"""The actor that is one rank: its stages, channels, optimizer, and one call per step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raymm.actors.executor.colocation import Colocation, default_backend
from raymm.actors.executor.executor import Executor, Prepared
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.faults.whereabouts import task
from raymm.actors.memory.peak_memory import PeakMemory
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.cut import own_buffers
from raymm.actors.modules.precision import cast_frozen
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    ShardFile,
    copy_tensors,
    stored_shards,
)
from raymm.actors.optimizer.checkpoint_writer import Files, SavingActor
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.rank.connections import Connections
from raymm.actors.rank.meeting import MeetingActor, MeetingPlace, Timeouts, prepare_nccl
from raymm.actors.rank.rank_spec import RankSpec
from raymm.actors.rank.step_calls import pack_result, remember, unpack_call
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.kernels.choice.choice import KERNEL_CHOICE
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import Instruction, Op

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage


class RankActor(SavingActor, MeetingActor):
    """One rank. Wrapped by ``ray.remote`` in :mod:`raymm.actors.rank.rank_group`."""

    def __init__(self, spec: RankSpec) -> None:
        timeouts = Timeouts.of(spec.timeout_s, spec.nccl_timeout_s)
        super().__init__(spec.rank, spec.device, timeouts)
        self._spec = spec
        self._device = torch.device(spec.device)
        prepare_nccl(self._device)
        self._stages: dict[StageId, EncoderStage | LanguageStage] = {}
        self._programs: OrderedDict[str, Prepared] = OrderedDict()
        self._colocation: Colocation | None = None

    # What :meth:`connect` and :meth:`build` make.
    _connections: Connections
    _executor: Executor
    _optimizer: RankOptimizer

    @task("meeting the other ranks")
    def connect(self, actors: Mapping[int, Any]) -> None:
        """Join the group of all processes, and make every other connection.

        Args:
            actors: of the spec's peers, by number.
        """
        spec = self._spec
        # Here, as OpenMP has a number per thread, and ``__init__`` ran in another one.
        torch.set_num_threads(spec.threads)
        KERNEL_CHOICE.use(spec.kernels)
        with self._meeting(spec.members, actors):
            place = MeetingPlace(
                self._device, self._store, spec.rank, spec.world_size, self._timeouts
            )
            self._device = place.device
            self._connections = Connections(spec, place, self.whereabouts)

    @task("building stages")
    def build(
        self, builders: dict[StageId, Callable[[], EncoderStage | LanguageStage]] | None = None
    ) -> dict[StageId, int]:
        """Build the stages, from ``builders`` if they are to be others than the spec's, and the
        streams of their modules' quotas. Returns the number of parameters held, per stage."""
        self._programs.clear()
        if self._spec.quotas and self._colocation is None:
            self._colocation = self._new_colocation()
        self._memory = PeakMemory(self._device)
        autocast = getattr(torch, self._spec.autocast) if self._spec.autocast else None
        self._stages = {}
        for name, builder in (builders or self._spec.builders).items():
            stage: Any = builder()  # it knows of what kind the module's plans are
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
            self._stages[name] = stage.to(self._device)
        if self._colocation is not None:
            of_module: dict[str, list[torch.nn.Module]] = {}
            for name, stage in self._stages.items():
                of_module.setdefault(name.module, []).append(stage)
            self._colocation.check(of_module)
        parameters = {
            (stage, name): parameter
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = RankOptimizer(
            self._spec.rank, parameters, self._spec.optimizer, self._spec.parameter_ownership,
            self._connections.reductions, self._device, self._stages.values(),
        )
        self._executor = Executor(
            self._stages, self._spec.edges, self._connections.senders,
            self._connections.receivers,
            {Op.REDUCE_GRADS: self._reduce_grads, Op.CLIP_GRADS: self._clip, Op.STEP: self._step},
            autocast=autocast,
            device=self._device,
            timeout=self._timeouts.wait,
            random_shares={} if self._connections.data is None else {
                name: stage.random_share for name, stage in self._stages.items()
            },
            sum_gradient=None if self._connections.data is None else self._sum_over_data,
            reduction=self._optimizer.reduction,
            colocation=self._colocation,
            whereabouts=self.whereabouts,
            observer=self._optimizer.observer,
            every=self._spec.every,
        )
        return {
            stage: sum(local_part(p).numel() for p in module.parameters())
            for stage, module in self._stages.items()
        }

    def _new_colocation(self) -> Colocation:
        spec, make = self._spec, self._spec.quota_backend
        backend = default_backend(self._device) if make is None else make()
        return Colocation(spec.quotas, backend, spec.timeout_s)

    def quotas(self) -> str:
        """What quotas were asked and granted, a line per module."""
        return "" if self._colocation is None else self._colocation.report()

    def _sum_over_data(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self._connections.data is not None
        dist.all_reduce(gradient, group=self._connections.data.group)
        return gradient

    def _reduce_grads(self, result: StepResult) -> None:
        self._optimizer.reduction.wait()

    def _clip(self, result: StepResult) -> None:
        self._optimizer.clip()

    def _step(self, result: StepResult) -> None:
        self._optimizer.step()

    def _finished(self, result: StepResult) -> StepResult:
        """The result of a step, once the device is done with it."""
        if self._optimizer.stepped:
            update = self._optimizer.finish()
            result.grad_norm, result.learning_rate = update.grad_norm, update.learning_rate
            result.not_finite = update.not_finite
        return result

    def load_program(
        self, key: str, instructions: Sequence[Instruction], issues: Sequence[Issue],
        bound: int | None = None,
    ) -> None:
        """Keep a program for :meth:`run_step`.

        Args:
            key: of the program.
            instructions: of this rank.
            issues: what it is to begin where.
            bound: messages of an edge that may be under way; None for any number.
        """
        remember(self._programs, key, self._executor.compile(instructions, issues, bound))

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
            key: of the program.
            meta: the step's metadata.
            layout: (stage, microbatch) that each of ``inputs`` is for; several entries for
                one place are merged. Inputs are separate arguments so that object
                references among them are resolved before the call.
            *inputs: keyword arguments of a stage, by name.
        """
        self._memory.restart()
        per_stage: dict[StageId, list[dict[str, Any] | None]] = {}
        for (stage, microbatch), part in zip(layout, inputs, strict=True):
            row = per_stage.setdefault(stage, [None] * len(meta.keys))
            moved = {k: to_device(v, self._device) for k, v in part.items()}
            row[microbatch] = {**(row[microbatch] or {}), **moved}
        program = self._programs[key]
        remember(self._programs, key, program)
        result = self._finished(self._executor.run(program, per_stage, meta))
        result.peak_bytes = self._memory.bytes()
        return result

    def run_packed_step(self, call: bytes, layout: bytes, *inputs: dict[str, Any]) -> bytes:
        """:meth:`run_step` (:mod:`raymm.actors.rank.step_calls`).

        Args:
            call: key and metadata.
            layout: of the inputs.
            *inputs: as of :meth:`run_step`.
        """
        return pack_result(self.run_step(*unpack_call(call, layout), *inputs))

    @task("the optimizer's step")
    def run_optimizer_ops(self, ops: Sequence[Op]) -> StepResult:
        """Run collective ops on their own, after steps that only accumulated gradients."""
        result = StepResult()
        actions = {
            Op.REDUCE_GRADS: self._reduce_grads, Op.CLIP_GRADS: self._clip, Op.STEP: self._step,
        }
        for op in ops:
            self.whereabouts.enter(Op(op).value)
            actions[Op(op)](result)
        return self._finished(result)

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._optimizer.zero_grad()

    @task("reading gradients")
    def gradients(self) -> dict[tuple[StageId, str], torch.Tensor | None]:
        """Gradients by (stage, name); None where a trainable parameter has none."""
        return self._optimizer.gradients()

    @task("reading parameters")
    def parameters(self, trainable_only: bool = False) -> dict[tuple[StageId, str], torch.Tensor]:
        """Parameters by (stage, name)."""
        return {
            (stage, name): local_part(parameter.detach()).cpu()
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or not trainable_only
        }

    def not_finite_tensors(self) -> list[str]:
        """Names, as in checkpoints, of parameters and optimizer state with values that are not
        finite, and how many."""
        return self._optimizer.not_finite_tensors(self._stages)

    def _shard(self, stage: StageId, name: str) -> ParameterShard | None:
        """Which shard of a parameter this process holds; None if all of it."""
        shard_spec = self._spec.shard_specs.get(stage.module)
        if shard_spec is None:
            return None
        groups = self._connections.tensors, self._connections.data
        tensors, data = (0 if group is None else group.rank for group in groups)
        return shard_spec.shard(name, shard_spec.place(tensors, data))

    def _named_tensors(self, stage: StageId) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Parameters and persistent buffers of a stage: the name, the name of the parameter that
        it is (of a tied one, the first of its names), and the tensor."""
        module = self._stages[stage]
        first = {parameter: name for name, parameter in module.named_parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            yield name, first.get(tensor, ""), tensor

    writes = ("write_copy",)
    save = task("saving a checkpoint")(SavingActor.save)
    copy_state = task("copying what is saved")(SavingActor.copy_state)

    @property
    def _saved_device(self) -> torch.device:
        return self._device

    def _files_to_save(self, skip_frozen: frozenset[str]) -> Files:
        rank, parameter_ownership = self._spec.rank, self._spec.parameter_ownership
        tensors: dict[str, torch.Tensor] = {}
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
                # Running statistics of what is trained change, though nothing has their gradient.
                changes = tensor.requires_grad or (not parameter and trained)
                if writes and (changes or owner not in skip_frozen):
                    shard = self._shard(stage, parameter) if parameter else None
                    local = local_part(tensor.detach())
                    tensors.update(stored_shards(f"{owner}/{name}", local, shard))
        state: dict[str, torch.Tensor] = {}
        for (stage, name, key), value in self._optimizer.state_tensors().items():
            if (stage, name) in parameter_ownership.in_grad_norm:
                shard = self._shard(stage, name) if value.dim() else None
                full = f"optimizer/{stage.module}/{name}/{key}"
                state.update(stored_shards(full, value, shard))
        kinds = {"model": tensors, "optimizer": state}
        return {f"{kind}-rank{rank}.safetensors": part for kind, part in kinds.items() if part}

    @task("loading a checkpoint")
    def load(
        self, folder: str, index: dict[str, str], files: dict[str, ShardFile], step: int
    ) -> Loaded:
        """Read parameters, buffers and optimizer state from files that are what ``files`` says.

        Args:
            folder: location of the checkpoint.
            index: the file that has each tensor, by the tensor's name.
            files: size and checksum of each, as the manifest has them.
            step: of the checkpoint, for the learning rate.

        Returns:
            What of its trainable parameters was in no file, and the names of all that was read.
        """
        stored = StoredTensors(folder, index, files)
        own = [
            (f"{stage.module}/{name}", local_part(tensor.detach()),
             self._shard(stage, parameter) if parameter else None)
            for stage in self._stages
            for name, parameter, tensor in self._named_tensors(stage)
        ]
        read = stored.read({name: shard for name, _, shard in own})
        copy_tensors(read, [(name, tensor) for name, tensor, _ in own])
        taken = list(read)
        state: dict[tuple[StageId, str, str], torch.Tensor] = {}
        keys = stored.optimizer_keys()
        for stage, name in self._optimizer.updated:
            base = f"optimizer/{stage.module}/{name}"
            shard = self._shard(stage, name)
            shards = {f"{base}/{key}": shard for key in keys.get(base, ())}
            for full, value in stored.read(shards).items():
                state[stage, name, full.rpartition("/")[2]] = value
                taken.append(full)
        self._optimizer.load_state_tensors(state, step)
        names = (f"{s.module}/{n}" for s, n in self._optimizer.parameters)
        return Loaded([name for name in names if name not in read], taken)
