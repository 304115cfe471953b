"""The actor that is one GPU of a multiplexed program: copies of modules, streams, one call per
step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.faults.whereabouts import task
from raymm.actors.memory.peak_memory import PeakMemory
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.node import NodeSpec
from raymm.actors.modules.precision import cast_frozen
from raymm.actors.multiplexed.checkpoint import files_to_save, load_shards
from raymm.actors.multiplexed.device import Device, Mode
from raymm.actors.multiplexed.iteration import Iteration
from raymm.actors.multiplexed.iteration_meta import (
    GpuProgram,
    GpuStepResult,
    IterationMeta,
    IterationResult,
)
from raymm.actors.multiplexed.messages import Messages
from raymm.actors.optimizer.checkpoint_shards import Loaded, ShardFile
from raymm.actors.optimizer.checkpoint_writer import Files, SavingActor
from raymm.actors.optimizer.gradient_reduction import ParameterReference, SharedParameter
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.optimizer.ownership import ParameterOwnership
from raymm.actors.quota import (
    Backend,
    ConcurrentModules,
    CudaBackend,
    Multiprocessors,
    RecordingBackend,
    StreamPool,
    check_no_shared_parameters,
)
from raymm.actors.rank.meeting import MeetingActor, MeetingPlace, Timeouts, prepare_nccl
from raymm.actors.rank.meeting_store import EVERYONE
from raymm.actors.rank.step_calls import remember
from raymm.kernels.choice.choice import KERNEL_CHOICE
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.multiplex.instructions import Part, Slot, said
from raymm.scheduler.plan.stage import StageId


@dataclass(frozen=True)
class GpuSpec:
    """Everything a process must know to build itself.

    Attributes:
        gpu, gpus: its number, and how many there are.
        graph: of all nodes.
        nodes: those with a copy here.
        slots: of the plan.
        steps: steps of a GPU's quota.
        copies: GPUs with a copy, by node.
        optimizer: the optimizer's configuration.
        autocast: name of the torch dtype for automatic mixed precision, or None.
        reloadable: nodes whose frozen weights can be had again from where they came from; under
            autocast they are kept in its dtype only.
        backend: makes the streams' backend; None: green contexts on CUDA, books on a CPU.
        kernels: that compute attention, see :mod:`raymm.kernels.choice.choice`.
        device: ``"cpu"`` or ``"cuda"``.
        threads: intra-op threads.
        timeout_s: seconds that any wait for modules or other GPUs may take.
        nccl_timeout_s: seconds after which NCCL's watchdog ends a process; None: twice as many.

    Raises:
        ValueError: threads or a timeout that cannot be.
    """

    gpu: int
    gpus: int
    graph: ModuleGraph
    nodes: tuple[NodeSpec, ...]
    slots: tuple[Slot, ...]
    steps: int
    replicas: Mapping[str, tuple[int, ...]]
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    autocast: str | None = None
    reloadable: frozenset[str] = frozenset()
    backend: Callable[[], Backend] | None = None
    kernels: str = "raymm"
    device: str = "cpu"
    threads: int = 1
    timeout_s: float = 300.0
    nccl_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise ValueError(f"threads is {self.threads!r}; accepted: a whole number from 1")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not (
            0 < self.timeout_s < inf
        ):
            raise ValueError(f"timeout_s is {self.timeout_s!r}; accepted: a positive number")

    @property
    def peers(self) -> set[int]:
        """All others: whose copies it shares may change."""
        return set(range(self.gpus)) - {self.gpu}


class GpuActor(SavingActor, MeetingActor):
    """One GPU. Wrapped by ``ray.remote`` in :mod:`raymm.actors.multiplexed.group`."""

    def __init__(self, spec: GpuSpec) -> None:
        timeouts = Timeouts.of(spec.timeout_s, spec.nccl_timeout_s)
        super().__init__(spec.gpu, spec.device, timeouts, said)
        self._spec = spec
        self._device = torch.device(spec.device)
        prepare_nccl(self._device)
        self._programs: OrderedDict[str, GpuProgram] = OrderedDict()
        self._layout_keys: OrderedDict[str, None] = OrderedDict()
        self._built: Device | None = None

    # What :meth:`connect` makes.
    _place: MeetingPlace

    @property
    def _built_device(self) -> Device:
        """What :meth:`build` has made."""
        assert self._built is not None
        return self._built

    @task("meeting the other GPUs")
    def connect(self, actors: Mapping[int, Any]) -> None:
        """Join the process groups: of all, for messages, and of every set of copies; and connect
        them, so that what cannot connect fails here, within the timeout.

        Args:
            actors: of the other processes, by number.
        """
        spec, everyone = self._spec, range(self._spec.gpus)
        # Here, as OpenMP has a number per thread, and ``__init__`` ran in another one.
        torch.set_num_threads(spec.threads)
        KERNEL_CHOICE.use(spec.kernels)
        self._num_process_groups = 2  # that have been made in the run
        with self._meeting({EVERYONE: everyone, 1: everyone, 2: everyone}, actors):
            self._place = MeetingPlace(
                self._device, self._store, spec.gpu, spec.gpus, self._timeouts
            )
            self._device = self._place.device
            self._messages: Messages | None = None
            if spec.gpus > 1:
                self._messages = Messages(
                    self._place.new_group(1, everyone), self._place.new_group(2, everyone, "gloo")
                )
        self._connect_replicas(actors)

    def _connect_replicas(self, actors: Mapping[int, Any]) -> None:
        """One group for every node, so that sums of different nodes need no common order."""
        shared = [
            (name, gpus)
            for name, gpus in sorted(self._spec.replicas.items())
            if len(gpus) > 1 and any(self._spec.graph.node(name).trainable)
        ]
        numbered = {
            number: named
            for number, named in enumerate(shared, start=self._num_process_groups + 1)
            if self._spec.gpu in named[1]
        }
        self._num_process_groups += len(shared)
        with self._meeting({number: gpus for number, (_, gpus) in numbered.items()}, actors):
            self._replicas = {
                name: self._place.new_group(number, gpus)
                for number, (name, gpus) in numbered.items()
            }

    @task("becoming another model's process")
    def replace(self, spec: GpuSpec, actors: Mapping[int, Any]) -> None:
        """Become another model's process; the old one's modules and streams are gone. The
        processes stay the same ones, and stay connected.

        Args:
            spec: the other model's.
            actors: of the other processes, by number.
        """
        self._built_device.concurrent_modules.close()
        pool, self._built = self._built_device.pool, None
        pool.close()
        for group in self._replicas.values():
            dist.destroy_process_group(group)
        self._spec = spec
        KERNEL_CHOICE.use(spec.kernels)
        self._programs.clear()
        self._layout_keys.clear()
        self._connect_replicas(actors)

    @task("building modules")
    def build(self) -> dict[str, int]:
        """Build the modules and the streams. Returns the number of parameters, per module."""
        spec = self._spec
        self._memory = PeakMemory(self._device)
        autocast = getattr(torch, spec.autocast) if spec.autocast else None
        modules: dict[str, nn.Module] = {}
        for node in spec.nodes:
            module = node.build()
            if autocast is not None and node.name in spec.reloadable:
                cast_frozen(module, autocast)
            modules[node.name] = module.to(self._device)
        check_no_shared_parameters(modules)
        parameters = {
            (StageId(node), name): parameter
            for node, module in modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        shared = tuple(
            SharedParameter(
                tuple(ParameterReference(gpu, *key) for gpu in spec.replicas[key[0].module])
            )
            for key in parameters
            if len(spec.replicas[key[0].module]) > 1
        )
        in_grad_norm = frozenset(
            key for key in parameters if spec.replicas[key[0].module][0] == spec.gpu
        )
        reduction_groups = {owned.reduction_group for owned in shared}
        self._built = Device(
            self._device,
            spec.graph,
            {node.name: node for node in spec.nodes},
            modules,
            [Mode(sub, sub.training) for module in modules.values() for sub in module.modules()],
            StreamPool(self._backend(), self._quotas()),
            ConcurrentModules(spec.timeout_s),
            self._messages,
            RankOptimizer(
                spec.gpu,
                parameters,
                spec.optimizer,
                ParameterOwnership(shared, in_grad_norm),
                {
                    reduction_group: self._replicas[reduction_group.stages[0].module]
                    for reduction_group in reduction_groups
                },
                self._device,
                modules.values(),
            ),
            autocast,
        )
        return {n: sum(p.numel() for p in m.parameters()) for n, m in modules.items()}

    def _backend(self) -> Backend:
        if self._spec.backend is not None:
            return self._spec.backend()
        if self._device.type == "cuda":
            return CudaBackend()
        return RecordingBackend(Multiprocessors(self._spec.steps, 1))

    def _quotas(self) -> dict[str, dict[str, float]]:
        """The quotas of exactly the slots that this GPU takes part in."""
        spec = self._spec
        return {
            slot.name: {n: quota / spec.steps for n, quota in slot.quotas[spec.gpu].items()}
            for slot in spec.slots
            if slot.quotas.get(spec.gpu)
        }

    def load_program(self, key: str, program: GpuProgram) -> None:
        """Keep a program under a key, for :meth:`run_step`."""
        remember(self._programs, key, program)

    @task("a step")
    def run_step(
        self,
        iterations: Sequence[tuple[str, IterationMeta]],
        places: Sequence[tuple[int, Part]],
        *entries: Mapping[str, Any],
    ) -> GpuStepResult:
        """Run iterations of loaded programs, one after another.

        Args:
            iterations: key of the program and what is to be known, of each.
            places: which iteration's which part each of ``entries`` is for.
            entries: what the parts' nodes read of the batch
                (:meth:`raymm.actors.modules.node.NodeSpec.own_entries`). Separate arguments,
                so that references among them are resolved before the call.

        Raises:
            ModuleError: naming the module that raised.
            ChannelError: another process is gone.
        """
        self._memory.restart()
        per_iteration: list[dict[Part, Mapping[str, Any]]] = [{} for _ in iterations]
        for (number, part), entry in zip(places, entries, strict=True):
            spec = self._built_device.specs[part.node]
            rows = iterations[number][1].rows(part.node, part.samples)
            per_iteration[number][part] = spec.own_entries(entry, rows)
        results = [
            self._run_iteration(key, meta, parts)
            for (key, meta), parts in zip(iterations, per_iteration, strict=True)
        ]
        return GpuStepResult(results, self._memory.bytes())

    def _run_iteration(
        self, key: str, meta: IterationMeta, entries: Mapping[Part, Mapping[str, Any]]
    ) -> IterationResult:
        program = self._programs[key]
        remember(self._programs, key, program)
        remember(self._layout_keys, meta.layout, None)
        self._built_device.layouts = {
            place: value for place, value in self._built_device.layouts.items()
            if place[0] in self._layout_keys and not (meta.new_layout and place[0] == meta.layout)
        }
        moved = {part: to_device(dict(value), self._device) for part, value in entries.items()}
        return Iteration(self._built_device, program, meta, moved, self.whereabouts).run()

    @task("the optimizer's step")
    def run_optimizer_ops(self) -> IterationResult:
        """Sum gradients over copies, clip, and step the optimizer, after iterations that only
        accumulated gradients."""
        optimizer = self._built_device.optimizer
        optimizer.reduction.wait()
        optimizer.clip()
        optimizer.step()
        update = optimizer.finish()
        return IterationResult(
            grad_norm=update.grad_norm, learning_rate=update.learning_rate,
            not_finite=update.not_finite,
        )

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._built_device.optimizer.zero_grad()

    writes = ("write_copy",)
    save = task("saving a checkpoint")(SavingActor.save)
    copy_state = task("copying what is saved")(SavingActor.copy_state)

    @property
    def _saved_device(self) -> torch.device:
        return self._device

    def _files_to_save(self, skip_frozen: frozenset[str]) -> Files:
        spec = self._spec
        first = {name for name in self._built_device.modules if spec.replicas[name][0] == spec.gpu}
        return files_to_save(spec.gpu, self._built_device, first, skip_frozen)

    @task("loading a checkpoint")
    def load(
        self, folder: str, index: dict[str, str], files: dict[str, ShardFile], step: int
    ) -> Loaded:
        """As :meth:`raymm.actors.rank.rank_actor.RankActor.load`."""
        return load_shards(folder, index, files, self._built_device, step)

    @task("reading gradients")
    def gradients(self) -> dict[tuple[str, str], torch.Tensor | None]:
        """Gradients by (node, name); None where a trainable parameter has none."""
        gradients = self._built_device.optimizer.gradients()
        return {(stage.module, name): gradient for (stage, name), gradient in gradients.items()}

    @task("reading parameters")
    def parameters(self, trainable_only: bool = False) -> dict[tuple[str, str], torch.Tensor]:
        """Parameters by (node, name)."""
        return {
            (node, name): parameter.detach().cpu()
            for node, module in self._built_device.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or not trainable_only
        }

    def not_finite_tensors(self) -> list[str]:
        """As :meth:`raymm.actors.rank.rank_actor.RankActor.not_finite_tensors`."""
        return self._built_device.optimizer.not_finite_tensors(
            {StageId(node): module for node, module in self._built_device.modules.items()}
        )

    def quotas(self) -> str:
        """What was asked and granted, a line per module of every slot."""
        return self._built_device.pool.report()
