"""The actor that is one rank: its stages, channels, optimizer, and one call per step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from raymm.actors.executor.channel import Link, RecvChannel, SendChannel
from raymm.actors.executor.colocation import Colocation, default_backend
from raymm.actors.executor.compiled_program import CompiledProgram
from raymm.actors.executor.executor import Executor, StepMeta, StepResult
from raymm.actors.faults.observed_actor import ObservedActor
from raymm.actors.faults.whereabouts import task
from raymm.actors.memory.peak_memory import PeakMemory
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.cut import own_buffers
from raymm.actors.modules.precision import cast_frozen
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    ShardFile,
    StoredTensors,
    WrittenShard,
    copy_tensors,
    stored_shards,
    write_shard,
)
from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.actors.optimizer.optimizer import OptimizerConfig, ParameterOwnership, RankOptimizer
from raymm.actors.quota import Backend
from raymm.actors.rank.meeting import TCPStore, new_group, open_store, stay_on
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.scheduler.plan.process_grid import P2PGroup
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Instruction, Op

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage

# Programs a rank keeps: one per combination of modalities seen in a step's microbatches.
MAX_PROGRAMS = 256


Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(programs: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Put ``key`` last and drop the least recently used entry beyond :data:`MAX_PROGRAMS`."""
    programs[key] = value
    programs.move_to_end(key)
    if len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)


class ProcessGroups(NamedTuple):
    """Processes of one rank: all of them; those that share a microbatch with one, its samples,
    its samples' tokens; and those that share every token's work. None where it is the only one."""

    rank: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSpec:
    """Everything a process must know to build itself.

    Attributes:
        rank, world_size: its number, and how many processes there are.
        builders: per stage name, a picklable function that builds the stage module.
        edges: all data edges of the plan (stage names).
        lanes: of every directed edge of messages between ranks, which processes have them.
        groups: every group of several processes of a rank, the same on all processes.
        neighbours: the processes of its own rank, by what they share.
        pieces: per module, which piece of each parameter a process holds.
        families: all families of processes that hold parameters together.
        holdings: what it has of parameters that others have too.
        optimizer: the optimizer's configuration.
        autocast: name of the torch dtype for automatic mixed precision, or None.
        reloadable: modules whose frozen weights can be had again from where they came from;
            under autocast they are kept in its dtype only.
        device: ``"cpu"`` or ``"cuda"``.
        threads: intra-op threads of this process.
        quotas: by module, shares of the device's multiprocessors.
        quota_backend: makes the quotas' streams; by default
            :func:`raymm.actors.executor.colocation.default_backend`.
        timeout_s: seconds any wait on another rank may take.
    """

    rank: int
    world_size: int
    builders: dict[StageId, Callable[[], EncoderStage | LanguageStage]]
    edges: tuple[Edge, ...]
    p2p_groups: tuple[tuple[Edge, tuple[P2PGroup, ...]], ...]
    groups: tuple[tuple[int, ...], ...] = ()
    process_groups: ProcessGroups = field(default_factory=ProcessGroups)
    pieces: dict[str, ShardSpec] = field(default_factory=dict)
    reduction_groups: tuple[ReductionGroup, ...] = ()
    parameter_ownership: ParameterOwnership = field(default_factory=ParameterOwnership)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    autocast: str | None = None
    reloadable: frozenset[str] = frozenset()
    device: str = "cpu"
    threads: int = 1
    quotas: dict[str, float] = field(default_factory=dict)
    quota_backend: Callable[[], Backend] | None = None
    timeout_s: float = 300.0


class RankActor(ObservedActor):
    """One rank. Wrapped by ``ray.remote`` in :mod:`raymm.actors.rank.rank_group`."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec.device)
        self._spec = spec
        self._device = torch.device(spec.device)
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._stages: dict[StageId, EncoderStage | LanguageStage] = {}
        self._programs: OrderedDict[str, CompiledProgram] = OrderedDict()
        self._store: TCPStore | None = None  # where ranks meet; the first one's listens
        self._colocation: Colocation | None = None

    # What :meth:`build` makes.
    _executor: Executor
    _optimizer: RankOptimizer

    def rendezvous(self) -> tuple[str, int]:
        """An address other ranks can reach this one at, for the first meeting."""
        address, self._store = open_store(self._spec.world_size, self._timeout)
        return address, self._store.port

    @task("meeting the other ranks")
    def connect(self, address: str, port: int) -> None:
        """Join the process groups: one of all ranks, one per directed remote edge."""
        spec = self._spec
        # Here, as OpenMP has a number per thread, and ``__init__`` ran in another one.
        torch.set_num_threads(spec.threads)
        stay_on(address)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        store = self._store or TCPStore(
            address, port, spec.world_size, is_master=False, timeout=self._timeout
        )
        dist.init_process_group(
            backend, store=store, rank=spec.rank, world_size=spec.world_size,
            timeout=self._timeout,
        )
        self._groups = {one: self._new_group(one) for one in spec.groups}
        process_groups = spec.process_groups
        self._data, self._samples, self._tokens = (
            Exchange(self._groups[group]) if group else None
            for group in (process_groups.data, process_groups.samples, process_groups.tokens)
        )
        self._tensors = (
            TensorGroup(self._groups[process_groups.tensors]) if process_groups.tensors else None
        )
        self._senders: dict[Edge, SendChannel] = {}
        self._receivers: dict[Edge, RecvChannel] = {}
        for edge, p2p_groups in spec.p2p_groups:
            for p2p_group in p2p_groups:
                self._open_p2p_group(edge, p2p_group)
        self._reduction_groups = {
            one: self._new_group(one.processes) for one in spec.reduction_groups
        }
        dist.all_reduce(torch.zeros(1, device=self._device))  # connects all pairs now, not later

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return new_group(ranks, self._timeout)

    def _open_p2p_group(self, edge: Edge, p2p_group: P2PGroup) -> None:
        """Each directed edge has its own groups, so that edges cannot block one another."""
        me, device, resharding = self._spec.rank, self._device, p2p_group.resharding
        links: dict[int, Link] = {}
        for sender, receiver in resharding.links():
            ends = p2p_group.senders[sender], p2p_group.receivers[receiver]
            group = self._new_group(ends)
            if me == ends[0]:
                links[receiver] = Link(group, ends[1])
            elif me == ends[1]:
                links[sender] = Link(group, ends[0])
        if me in p2p_group.senders:
            # What goes back from another module is a gradient that every process which shares
            # the microbatch has a part of.
            is_gradient = edge not in self._spec.edges
            between = edge[0].module != edge[1].module
            summed = self._data.group if is_gradient and between and self._data else None
            self._senders[edge] = SendChannel(
                links, device, resharding, p2p_group.senders.index(me), summed
            )
        elif me in p2p_group.receivers:
            self._receivers[edge] = RecvChannel(
                links, device, self._timeout, resharding, p2p_group.receivers.index(me),
                self._groups.get(p2p_group.receivers),
            )

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
            pieces = self._spec.pieces.get(name.module, ShardSpec())
            if self._tensors is not None:
                stage.shard_tensors(pieces.plans, self._tensors)
            if self._samples is not None:
                stage.share_samples(self._samples)
            if self._tokens is not None:
                stage.share_tokens(self._tokens)
            if autocast is not None and name.module in self._spec.reloadable:
                cast_frozen(stage, autocast)
            if pieces.shards > 1:  # first: the device never holds the whole stage
                assert self._data is not None
                stage.shard_parameters(pieces.plans, self._data.group, self._device)
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
            self._reduction_groups, self._device, self._stages.values(),
        )
        self._executor = Executor(
            self._stages, self._spec.edges, self._senders, self._receivers,
            {Op.REDUCE_GRADS: self._reduce_grads, Op.CLIP_GRADS: self._clip, Op.STEP: self._step},
            autocast, self._device, self._timeout,
            random_shares={} if self._data is None else {
                name: stage.random_share for name, stage in self._stages.items()
            },
            sum_gradient=None if self._data is None else self._sum_over_data,
            reduction=self._optimizer.reduction,
            colocation=self._colocation,
            whereabouts=self.whereabouts,
            observer=self._optimizer.observer,
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
        assert self._data is not None
        dist.all_reduce(gradient, group=self._data.group)
        return gradient

    def _reduce_grads(self, result: StepResult) -> None:
        self._optimizer.reduction.wait()

    def _clip(self, result: StepResult) -> None:
        result.grad_norm = self._optimizer.clip()
        result.not_finite = self._optimizer.not_finite

    def _step(self, result: StepResult) -> None:
        result.learning_rate = self._optimizer.step()

    def load_program(self, key: str, instructions: Sequence[Instruction]) -> None:
        """Keep a program under a key, for :meth:`run_step`."""
        remember(self._programs, key, self._executor.compile(instructions))

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
        """
        self._memory.restart()
        per_stage: dict[StageId, list[dict[str, Any] | None]] = {}
        for (stage, microbatch), part in zip(layout, inputs, strict=True):
            row = per_stage.setdefault(stage, [None] * len(meta.keys))
            moved = {k: to_device(v, self._device) for k, v in part.items()}
            row[microbatch] = {**(row[microbatch] or {}), **moved}
        program = self._programs[key]
        remember(self._programs, key, program)
        result = self._executor.run(program, per_stage, meta)
        result.peak_bytes = self._memory.bytes()
        return result

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
        return result

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._optimizer.zero_grad()

    @task("reading gradients")
    def gradients(self) -> dict[tuple[StageId, str], torch.Tensor | None]:
        """Gradients by (stage, name); None where a trainable parameter has none."""
        return {
            key: None if p.grad is None else local_part(p.grad).cpu()
            for key, p in self._optimizer.parameters.items()
        }

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

    def _piece(self, stage: StageId, name: str) -> ParameterShard | None:
        """Which piece of a parameter this process holds; None if all of it."""
        chain = self._spec.pieces.get(stage.module)
        if chain is None:
            return None
        tensors, data = (0 if one is None else one.rank for one in (self._tensors, self._data))
        return chain.piece(name, chain.place(tensors, data))

    def _named_tensors(self, stage: StageId) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Parameters and persistent buffers of a stage: the name, the name of the parameter that
        it is (of a tied one, the first of its names), and the tensor."""
        module = self._stages[stage]
        first = {parameter: name for name, parameter in module.named_parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            yield name, first.get(tensor, ""), tensor

    @task("saving a checkpoint")
    def save(self, folder: str, skip_frozen: frozenset[str]) -> dict[str, WrittenShard]:
        """Write this process's shards; returns what is in them, per file. Of what several
        processes have, one writes.

        Args:
            folder: an existing folder that is not committed yet.
            skip_frozen: modules whose frozen weights are elsewhere and need no copy.
        """
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
                    piece = self._piece(stage, parameter) if parameter else None
                    here = local_part(tensor.detach())
                    tensors.update(stored_shards(f"{owner}/{name}", here, piece))
        state: dict[str, torch.Tensor] = {}
        for (stage, name, key), value in self._optimizer.state_tensors().items():
            if (stage, name) in parameter_ownership.in_grad_norm:
                piece = self._piece(stage, name) if value.dim() else None
                full = f"optimizer/{stage.module}/{name}/{key}"
                state.update(stored_shards(full, value, piece))
        written = {}
        for kind, found in (("model", tensors), ("optimizer", state)):
            if found:
                file = f"{kind}-rank{rank}.safetensors"
                written[file] = write_shard(Path(folder) / file, _untie(found))
        return written

    @task("loading a checkpoint")
    def load(
        self, folder: str, index: dict[str, str], files: dict[str, ShardFile], step: int
    ) -> Loaded:
        """Read parameters, buffers and optimizer state from files that are what ``files`` says."""
        stored = StoredTensors(Path(folder), index, files)
        own = [
            (f"{stage.module}/{name}", local_part(tensor.detach()),
             self._piece(stage, parameter) if parameter else None)
            for stage in self._stages
            for name, parameter, tensor in self._named_tensors(stage)
        ]
        read = stored.read({name: piece for name, _, piece in own})
        copy_tensors(read, [(name, tensor) for name, tensor, _ in own])
        taken = list(read)
        state: dict[tuple[StageId, str, str], torch.Tensor] = {}
        keys = stored.optimizer_keys()
        for stage, name in self._optimizer.updated:
            base = f"optimizer/{stage.module}/{name}"
            piece = self._piece(stage, name)
            wanted = {f"{base}/{key}": piece for key in keys.get(base, ())}
            for full, value in stored.read(wanted).items():
                state[stage, name, full.rpartition("/")[2]] = value
                taken.append(full)
        self._optimizer.load_state_tensors(state, step)
        names = (f"{s.module}/{n}" for s, n in self._optimizer.parameters)
        return Loaded([name for name in names if name not in read], taken)


def _untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors refuses tensors that share memory; tied ones are written once each."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
