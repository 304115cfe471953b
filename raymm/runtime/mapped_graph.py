"""A graph of nodes under a mapping: who has copies of what, and the programs of its batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from raymm.actors.modules.node import NodeSpec
from raymm.actors.multiplexed.gpu_actor import GpuSpec
from raymm.actors.multiplexed.iteration_meta import IterationResult
from raymm.actors.rank.step_calls import remember
from raymm.runtime.options import RuntimeOptions
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.multiplex.check_program import check_program
from raymm.scheduler.multiplex.instructions import MultiplexProgram, Part, Run
from raymm.scheduler.multiplex.lowering import lower, replicas_of, slots_of
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Span, Timeline

_OPS = {Direction.FORWARD: Op.FORWARD, Direction.BACKWARD: Op.BACKWARD}


class ProgramKind(NamedTuple):
    """Which program.

    Attributes:
        batch: samples.
        train, reduce, update: as of :func:`raymm.scheduler.multiplex.lowering.lower`.
    """

    batch: int
    train: bool = True
    reduce: bool = True
    update: bool = False

    @property
    def key(self) -> str:
        """A name of it."""
        return "/".join(map(str, self))


class MappedGraph:
    """A graph and a mapping of it.

    Args:
        graph: what is run.
        mapping: where and when.
        lockstep: every stage begins on all GPUs at once.

    Attributes:
        slots: what runs concurrently.
        copies: GPUs with a copy, by node.

    Raises:
        MultiplexError: a mapping that is not of this graph.
    """

    def __init__(self, graph: ModuleGraph, mapping: StageMapping, lockstep: bool = False) -> None:
        self.graph, self.mapping, self.lockstep = graph, mapping, lockstep
        self.slots = slots_of(graph, mapping)
        self.replicas = replicas_of(self.slots)
        self._programs: OrderedDict[ProgramKind, MultiplexProgram] = OrderedDict()
        self.program(ProgramKind(mapping.gpus))  # refuses what does not fit, before anything starts

    def program(self, kind: ProgramKind) -> MultiplexProgram:
        """The checked program."""
        program = self._programs.get(kind)
        if program is None:
            program = lower(
                self.graph, self.mapping, kind.batch, train=kind.train, reduce=kind.reduce,
                update=kind.update, lockstep=self.lockstep,
            )
            check_program(self.graph, program)
        remember(self._programs, kind, program)
        return program

    def gpu_specs(
        self, nodes: Iterable[NodeSpec], options: RuntimeOptions,
        reloadable: frozenset[str] = frozenset(),
    ) -> list[GpuSpec]:
        """Of every GPU, what its process is built from.

        Args:
            nodes: all of the graph's.
            options: how they run.
            reloadable: nodes whose frozen weights can be had again from where they came from.
        """
        nodes, mapping = tuple(nodes), self.mapping
        return [
            GpuSpec(
                gpu, mapping.gpus, self.graph,
                tuple(node for node in nodes if gpu in self.replicas[node.name]),
                self.slots, mapping.steps, self.replicas,
                optimizer=options.optimizer, autocast=options.autocast, reloadable=reloadable,
                backend=options.quota_backend, device=options.device, threads=options.threads,
                kernels=options.kernels,
                timeout_s=options.timeout_s, nccl_timeout_s=options.nccl_timeout_s,
            )
            for gpu in range(mapping.gpus)
        ]


def forward_parts(program: MultiplexProgram, gpu: int) -> list[Part]:
    """What a GPU runs forward."""
    return [
        part
        for instruction in program.instructions[gpu]
        if isinstance(instruction, Run) and instruction.direction is Direction.FORWARD
        for part in instruction.parts
    ]


def stage_edges(edges: Iterable[tuple[str, str]]) -> tuple[Edge, ...]:
    """Edges between nodes as edges between stages, of which every node is one."""
    return tuple((StageId(source), StageId(target)) for source, target in edges)


def losses_of(results: Iterable[IterationResult], losses: Iterable[str]) -> dict[str, float]:
    """All GPUs' parts of losses, added up."""
    sums = dict.fromkeys(losses, 0.0)
    for result in results:
        for name, value in result.losses.items():
            sums[name] += value
    return sums


def timeline_of(gpus: Sequence[Sequence[IterationResult]], slots: bool = False) -> Timeline:
    """When each node ran on each GPU, from the first one's beginning.

    Args:
        gpus: results of a step's iterations, by GPU.
        slots: a span's ``microbatch`` is the slot, not the number of the iteration.
    """
    origin = min(result.start for results in gpus for result in results)
    return Timeline(
        tuple(
            Span(
                gpu, _OPS[run.direction], StageId(run.node),
                run.slot if slots else number, run.start - origin, run.end - origin,
            )
            for gpu, results in enumerate(gpus)
            for number, result in enumerate(results)
            for run in result.runs
        ),
        len(gpus),
    )


def cut_entries(
    batch: Mapping[str, torch.Tensor], names: Iterable[str], part: Part
) -> dict[str, torch.Tensor]:
    """A part's samples of entries. Copies: views would bring the whole batch along.

    Args:
        batch: tensors with samples in dimension 0.
        names: of the entries.
        part: whose samples they are.
    """
    return {name: batch[name][slice(*part.samples)].clone() for name in dict.fromkeys(names)}
