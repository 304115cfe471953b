"""The driver's handle on the processes of a multiplexed program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymm.actors.group import RankGroup, RankResources
from raymm.actors.multiplexed.gpu_actor import GpuActor, GpuSpec
from raymm.actors.multiplexed.iteration import GpuProgram, IterationMeta, IterationResult
from raymm.actors.rank_actor import remember
from raymm.scheduler.multiplex.instructions import MultiplexProgram, Part

# What one GPU's part reads: its samples of entries of the batch, or a reference to them.
Entries = Mapping[str, torch.Tensor]


class GpuGroup(RankGroup):
    """All GPUs' processes, one Ray actor each; a process that dies surfaces at once.

    Args:
        specs: one per GPU, in order.
        resources: what each reserves.

    Raises:
        ClusterError: if the cluster cannot hold them.
        RankFailedError: if one cannot start.
    """

    def __init__(self, specs: Sequence[GpuSpec], resources: RankResources) -> None:
        labels = [", ".join(node.name for node in spec.nodes) for spec in specs]
        super().__init__(specs, labels, resources)
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._layouts: OrderedDict[str, None] = OrderedDict()

    def _create(self, spec: GpuSpec, index: int, resources: RankResources) -> Any:
        remote = ray.remote(GpuActor).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom) or None,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=index
            ),
        )
        return remote.remote(spec)

    def _name(self, rank: int) -> str:
        return f"GPU {rank} (modules {self._labels[rank]}{self._places[rank]})"

    def load(self, key: str, program: MultiplexProgram) -> None:
        """Hand every GPU its instructions, once per key."""
        if key not in self._loaded:
            for gpu, actor in enumerate(self._actors):
                needs = {
                    node: ranges for (node, at), ranges in program.needs.items() if at == gpu
                }
                actor.load_program.remote(key, GpuProgram(
                    gpu, program.batch, program.instructions[gpu], program.turns, needs
                ))
        remember(self._loaded, key, None)

    def is_new_layout(self, layout: str) -> bool:
        """Whether GPUs have not seen tensors of these shapes, or no longer know them."""
        new = layout not in self._layouts
        remember(self._layouts, layout, None)
        return new

    def run(
        self, key: str, meta: IterationMeta, inputs: Sequence[Mapping[Part, Entries]]
    ) -> list[IterationResult]:
        """Run an iteration on all GPUs.

        Args:
            key: of a loaded program.
            meta: of the iteration.
            inputs: per GPU and part, what it reads of the batch.

        Raises:
            RankFailedError: if a process died or a module raised.
        """
        refs = [
            actor.run_iteration.remote(key, meta, list(one), *one.values())
            for actor, one in zip(self._actors, inputs, strict=True)
        ]
        return self.wait(refs)
