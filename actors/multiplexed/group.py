"""The driver's handle on the processes of a multiplexed program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from raymm.actors.multiplexed.gpu_actor import GpuActor, GpuSpec
from raymm.actors.multiplexed.iteration_meta import (
    GpuProgram,
    GpuStepResult,
    IterationMeta,
    IterationResult,
)
from raymm.actors.placement.placement import ONLY_RANKS, PlacementOptions
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.step_calls import StepHandle, remember
from raymm.scheduler.multiplex.instructions import MultiplexProgram, Part

# What one GPU's part reads: its samples of entries of the batch, or a reference to them.
Entries = Mapping[str, torch.Tensor]


class GpuGroup(RankGroup):
    """All GPUs' processes, one Ray actor each; a process that dies surfaces at once.

    Args:
        specs: one per GPU, in order.
        resources: what each reserves.
        placement: what is reserved with them.

    Attributes:
        generation: how often the model was replaced.

    Raises:
        ClusterError: if the cluster cannot hold them.
        RankFailedError: if one cannot start.
    """

    actor_class = GpuActor

    def __init__(
        self, specs: Sequence[GpuSpec], resources: RankResources,
        placement: PlacementOptions = ONLY_RANKS,
    ) -> None:
        super().__init__(specs, _labels(specs), resources, placement)
        self.generation = 0
        self._spec, self._resources = specs[0], resources
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._layouts: OrderedDict[str, None] = OrderedDict()

    @classmethod
    def of(
        cls, specs: Sequence[GpuSpec], resources: RankResources | None, group: GpuGroup | None,
        placement: PlacementOptions = ONLY_RANKS,
    ) -> GpuGroup:
        """New processes; or those of a group whose model is no longer used.

        Args:
            specs: one per GPU.
            resources: what each reserves; by default one CPU, and a GPU on CUDA.
            group: to take over; None for new ones.
            placement: of new ones.

        Raises:
            ValueError: the group has another number of processes, or they are of another device,
                with other resources, threads or another timeout.
            RuntimeError: the group's processes have ended.
            ClusterError, RankFailedError: as of the class.
        """
        if group is None:
            default = RankResources(gpus=float(specs[0].device == "cuda"))
            return cls(specs, resources or default, placement)
        group.check_running()
        if group.num_ranks != len(specs):
            raise ValueError(
                f"group has {group.num_ranks} processes; accepted: {len(specs)}, the mapping's"
            )
        for name in ("device", "threads", "timeout_s"):
            has, asked = getattr(group._spec, name), getattr(specs[0], name)
            if has != asked:
                raise ValueError(
                    f"{name} is {asked!r}, and the group's processes have {has!r}; accepted: the "
                    "same"
                )
        if resources not in (None, group._resources):
            raise ValueError(
                f"resources is {resources}, and the group's processes have {group._resources}; "
                "accepted: the same, None"
            )
        group.replace(specs)
        return group

    def _name(self, rank: int) -> str:
        return f"GPU {rank} (modules {self._labels[rank]}{self._places[rank]})"

    def replace(self, specs: Sequence[GpuSpec]) -> None:
        """Run another model, or the same one under another mapping, in the same processes.

        Args:
            specs: as many as there are processes, of the same device and timeout.
        """
        self.check_running()
        refs = [
            actor.replace.remote(spec, {n: self._actors[n] for n in spec.peers})
            for actor, spec in zip(self._actors, specs, strict=True)
        ]
        self.generation += 1
        self._labels = _labels(specs)
        self._loaded.clear()
        self._layouts.clear()
        self.wait(refs)
        self.num_parameters = self.call("build")

    def load(self, key: str, program: MultiplexProgram) -> None:
        """Hand every GPU its instructions, once per key."""
        if key not in self._loaded:
            for gpu, actor in enumerate(self._actors):
                needs = {
                    node: ranges for (node, at), ranges in program.needs.items() if at == gpu
                }
                actor.load_program.remote(key, GpuProgram(
                    gpu, program.batch, program.instructions[gpu], program.slots, needs
                ))
        remember(self._loaded, key, None)

    def is_new_layout(self, layout: str) -> bool:
        """Whether GPUs have not seen tensors of these shapes, or no longer know them."""
        new = layout not in self._layouts
        remember(self._layouts, layout, None)
        return new

    def submit(
        self,
        iterations: Sequence[tuple[str, IterationMeta]],
        inputs: Sequence[Mapping[tuple[int, Part], Entries]],
    ) -> StepHandle[GpuStepResult]:
        """Start a step on all GPUs; returns at once. Steps run in the order submitted.

        Args:
            iterations: of the step, one after another: key of a loaded program, and what GPUs are
                to know.
            inputs: per GPU, what the parts of its iterations (by number) read of the batch.

        Raises:
            RuntimeError: the processes have ended.
        """
        self.check_running()
        with self._order:
            refs = [
                actor.run_step.remote(list(iterations), list(parts), *parts.values())
                for actor, parts in zip(self._actors, inputs, strict=True)
            ]
        return StepHandle(self, refs)

    def run_optimizer_ops(self) -> list[IterationResult]:
        """Sum accumulated gradients, clip and step the optimizer, on all GPUs."""
        return self.call("run_optimizer_ops")


def _labels(specs: Sequence[GpuSpec]) -> list[str]:
    return [", ".join(node.name for node in spec.nodes) for spec in specs]
