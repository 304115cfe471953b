"""The actor that is one rank: its stages, channels, optimizer, and one call per step."""

from __future__ import annotations

import os
import platform
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raymm.actors.channel import ChannelError, RecvChannel, SendChannel
from raymm.actors.executor import CompiledProgram, Executor, StepMeta, StepResult
from raymm.actors.optimizer import OptimizerConfig, RankOptimizer, SharedParameter
from raymm.actors.shards import copy_tensors, read_tensors, write_shard
from raymm.actors.stages.precision import cast_frozen
from raymm.actors.to_device import to_device
from raymm.kernels.exchange import Exchange
from raymm.scheduler.program import Instruction, Op

# Programs a rank keeps: one per combination of modalities seen in a step's microbatches.
MAX_PROGRAMS = 256


def remember(programs: OrderedDict[str, Any], key: str, value: Any) -> None:
    """Put ``key`` last and drop the least recently used entry beyond :data:`MAX_PROGRAMS`."""
    programs[key] = value
    programs.move_to_end(key)
    if len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank must know to build itself.

    Attributes:
        rank, world_size: its place.
        builders: per stage name, a picklable function that builds the stage module.
        edges: all data edges of the plan (stage names).
        stage_ranks: rank of every stage.
        context_ranks: groups of processes that share every sample's tokens.
        shared: the plan's shared parameters.
        optimizer: the optimizer's configuration.
        autocast: name of the torch dtype for automatic mixed precision, or None.
        reloadable: modules whose frozen weights can be had again from where they came from;
            under autocast they are kept in its dtype only.
        device: ``"cpu"`` or ``"cuda"``.
        threads: intra-op threads of this process.
        timeout_s: seconds any wait on another rank may take.
    """

    rank: int
    world_size: int
    builders: dict[str, Callable[[], torch.nn.Module]]
    edges: tuple[tuple[str, str], ...]
    stage_ranks: dict[str, int]
    context_ranks: tuple[tuple[int, ...], ...] = ()
    shared: tuple[SharedParameter, ...] = ()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    autocast: str | None = None
    reloadable: frozenset[str] = frozenset()
    device: str = "cpu"
    threads: int = 1
    timeout_s: float = 300.0


class RankActor:
    """One rank. Wrapped by ``ray.remote`` in :mod:`raymm.actors.group`."""

    def __init__(self, spec: RankSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._device = torch.device(spec.device)
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._stages: dict[str, torch.nn.Module] = {}
        self._programs: OrderedDict[str, CompiledProgram] = OrderedDict()
        self._executor: Executor | None = None
        self._optimizer: RankOptimizer | None = None

    def describe(self) -> dict[str, Any]:
        """Where this rank lives."""
        return {"host": platform.node(), "pid": os.getpid(), "device": str(self._device)}

    def rendezvous(self) -> tuple[str, int]:
        """An address other ranks can reach this one at, for the first meeting."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]

    def connect(self, address: str, port: int) -> None:
        """Join the process groups: one of all ranks, one per directed remote edge."""
        spec = self._spec
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://{address}:{port}", rank=spec.rank,
            world_size=spec.world_size, timeout=self._timeout,
        )
        self._senders: dict[tuple[str, str], SendChannel] = {}
        self._receivers: dict[tuple[str, str], RecvChannel] = {}
        for src, dst in spec.edges:
            for edge in ((src, dst), (dst, src)):
                self._open_edge(edge)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for one in spec.shared:  # copies of a module share hundreds of parameters
            if len(one.ranks) > 1 and one.ranks not in groups:
                groups[one.ranks] = dist.new_group(list(one.ranks), timeout=self._timeout)
        self._context: Exchange | None = None
        for ranks in spec.context_ranks:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            if spec.rank in ranks:
                self._context = Exchange(group)
        self._shared_groups = tuple(groups.get(one.ranks) for one in spec.shared)
        dist.all_reduce(torch.zeros(1, device=self._device))  # connects all pairs now, not later

    def _open_edge(self, edge: tuple[str, str]) -> None:
        """Each directed edge has its own group, so that edges cannot block one another."""
        sender, receiver = (self._spec.stage_ranks[stage] for stage in edge)
        if sender == receiver:
            return
        group = dist.new_group([sender, receiver], timeout=self._timeout)
        if self._spec.rank == sender:
            self._senders[edge] = SendChannel(group, receiver, self._device)
        elif self._spec.rank == receiver:
            self._receivers[edge] = RecvChannel(group, sender, self._device, self._timeout)

    def build(
        self, builders: dict[str, Callable[[], torch.nn.Module]] | None = None
    ) -> dict[str, int]:
        """Build the stages, from ``builders`` if they are to be others than the spec's.
        Returns the number of parameters held, per stage."""
        self._programs.clear()
        autocast = getattr(torch, self._spec.autocast) if self._spec.autocast else None
        self._stages = {}
        for name, builder in (builders or self._spec.builders).items():
            stage = builder()
            if self._context is not None:
                stage.share_tokens(self._context)
            if autocast is not None and _owner(name) in self._spec.reloadable:
                cast_frozen(stage, autocast)
            self._stages[name] = stage.to(self._device)
        parameters = {
            (stage, name): parameter
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = RankOptimizer(
            parameters, self._spec.optimizer, self._spec.shared, self._shared_groups, self._device
        )
        self._executor = Executor(
            self._stages, self._spec.edges, self._senders, self._receivers,
            {Op.REDUCE_TIED: self._reduce_tied, Op.CLIP_GRADS: self._clip, Op.STEP: self._step},
            autocast, self._device, self._timeout,
        )
        return {
            stage: sum(p.numel() for p in module.parameters())
            for stage, module in self._stages.items()
        }

    def _reduce_tied(self, result: StepResult) -> None:
        with _reporting_connections("summing gradients of shared parameters"):
            self._optimizer.reduce_tied()

    def _clip(self, result: StepResult) -> None:
        with _reporting_connections("the gradient norm over all ranks"):
            result.grad_norm = self._optimizer.clip()

    def _step(self, result: StepResult) -> None:
        result.learning_rate = self._optimizer.step()

    def load_program(self, key: str, instructions: Sequence[Instruction]) -> None:
        """Keep a program under a key, for :meth:`run_step`."""
        remember(self._programs, key, self._executor.compile(instructions))

    def run_step(
        self,
        key: str,
        meta: StepMeta,
        layout: Sequence[tuple[str, int]] = (),
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
        per_stage: dict[str, list[dict[str, Any] | None]] = {}
        for (stage, microbatch), part in zip(layout, inputs, strict=True):
            row = per_stage.setdefault(stage, [None] * len(meta.keys))
            moved = {k: to_device(v, self._device) for k, v in part.items()}
            row[microbatch] = {**(row[microbatch] or {}), **moved}
        program = self._programs[key]
        remember(self._programs, key, program)
        return self._executor.run(program, per_stage, meta)

    def run_epilogue(self, ops: Sequence[Op]) -> StepResult:
        """Run collective ops on their own, after steps that only accumulated gradients."""
        result = StepResult()
        actions = {
            Op.REDUCE_TIED: self._reduce_tied, Op.CLIP_GRADS: self._clip, Op.STEP: self._step,
        }
        for op in ops:
            actions[Op(op)](result)
        return result

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._optimizer.zero_grad()

    def gradients(self) -> dict[tuple[str, str], torch.Tensor | None]:
        """Gradients by (stage, name); None where a trainable parameter has none."""
        return {
            key: None if p.grad is None else p.grad.cpu()
            for key, p in self._optimizer.parameters.items()
        }

    def parameters(self, trainable_only: bool = False) -> dict[tuple[str, str], torch.Tensor]:
        """Parameters by (stage, name)."""
        return {
            (stage, name): parameter.detach().cpu()
            for stage, module in self._stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or not trainable_only
        }

    def _named_tensors(
        self, stages: Iterable[str], skip: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers as ``module/name`` (the module, not the stage:
        a checkpoint does not depend on how a module was cut). A name comes once per stage
        that holds the tensor: two stages of a model with tied embeddings may share a rank."""
        for stage in stages:
            owner = _owner(stage)
            for name, tensor in self._stages[stage].state_dict(keep_vars=True).items():
                trainable = getattr(tensor, "requires_grad", False)
                if trainable or owner not in skip:
                    yield f"{owner}/{name}", tensor.detach()

    def save(self, folder: str, skip_frozen: frozenset[str]) -> dict[str, list[str]]:
        """Write this rank's shards; returns tensor names per file. Of a module that has
        several copies, the first one writes.

        Args:
            folder: an existing folder that is not committed yet.
            skip_frozen: modules whose frozen weights are elsewhere and need no copy.
        """
        rank = self._spec.rank
        writing = [stage for stage in self._stages if _is_first_copy(stage)]
        files = {f"model-rank{rank}.safetensors": dict(self._named_tensors(writing, skip_frozen))}
        if self._optimizer.parameters:
            state = self._optimizer.state_tensors()
            files[f"optimizer-rank{rank}.safetensors"] = {
                _module_key(name): tensor for name, tensor in state.items()
                if name.partition("/")[0] in writing
            }
        written = {}
        for file, tensors in files.items():
            if tensors:
                write_shard(Path(folder) / file, _untie(tensors))
                written[file] = sorted(tensors)
        return written

    def load(self, folder: str, index: dict[str, str], step: int) -> list[str]:
        """Read parameters, buffers and optimizer state; returns trainable parameters that
        the checkpoint lacks."""
        own = list(self._named_tensors(self._stages))
        stored = read_tensors(Path(folder), index, list(dict(own)))
        copy_tensors(stored, own)
        prefixes = {f"{s}/{n}/": f"{_owner(s)}/{n}/" for s, n in self._optimizer.parameters}
        state = {}
        for local, saved in prefixes.items():
            names = [n for n in index if n.startswith("optimizer/" + saved)]
            for name, value in read_tensors(Path(folder), index, names).items():
                state[local + name.removeprefix("optimizer/" + saved)] = value
        self._optimizer.load_state_tensors(state, step)
        return [
            f"{_owner(s)}/{n}" for s, n in self._optimizer.parameters
            if f"{_owner(s)}/{n}" not in stored
        ]


@contextmanager
def _reporting_connections(what: str) -> Iterator[None]:
    """Collectives raise a bare RuntimeError when another rank is gone; the driver looks for
    that rank when it gets a ChannelError."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelError(f"{what}: {error}") from error


def _owner(stage: str) -> str:
    return stage.rpartition(".")[0]


def _is_first_copy(stage: str) -> bool:
    """Neither of a module's second copy (``llm.0@1``) nor a rank's second process (``llm.0#1``)."""
    return stage.rpartition(".")[2].isdigit()


def _module_key(name: str) -> str:
    """``stage/parameter/key`` -> ``optimizer/module/parameter/key``."""
    stage, _, rest = name.partition("/")
    return f"optimizer/{_owner(stage)}/{rest}"


def _untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors refuses tensors that share memory; tied ones are written once each."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
