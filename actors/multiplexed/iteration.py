"""One iteration of one GPU's instructions: what it has made, what it has got, when."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.multiplexed.clock import RunClock, TimedRun
from raymm.actors.multiplexed.messages import Messages
from raymm.actors.multiplexed.node import ONLY, NodeSpec, OutputError, Tensors, call
from raymm.actors.multiplexed.samples import LAYOUT_BYTES, Layout, Samples, empty
from raymm.actors.optimizer import RankOptimizer
from raymm.actors.quota import Output, SideBySide, StreamPool, Work
from raymm.actors.stages.source import derive_seed
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Direction,
    Finish,
    Instruction,
    Part,
    Piece,
    Reduce,
    Route,
    Run,
    Turn,
    Update,
)
from raymm.scheduler.multiplex.node_graph import NodeGraph
from raymm.scheduler.multiplex.sample_ranges import Range


@dataclass(frozen=True)
class GpuProgram:
    """What one GPU gets of a program.

    Attributes:
        gpu: its number.
        batch: samples of the whole batch.
        instructions: its list.
        turns: of all GPUs.
        needs: per producer, the samples that it reads here.
    """

    gpu: int
    batch: int
    instructions: tuple[Instruction, ...]
    turns: tuple[Turn, ...]
    needs: Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class IterationMeta:
    """What all GPUs are told about an iteration.

    Attributes:
        step: its number, for seeds.
        seed: the run's seed.
        layout: key of the tensors' shapes; of a new one layouts travel before the tensors.
        new_layout: whether none of the GPUs has seen it.
        scales: by loss, what the sum over samples is multiplied with.
        training: with backward; modules in training mode.
    """

    step: int
    seed: int
    layout: str
    new_layout: bool
    scales: Mapping[str, float]
    training: bool = True


@dataclass
class IterationResult:
    """What a GPU reports.

    Attributes:
        losses: by loss, the scaled sum over the samples here.
        runs: when its nodes ran.
        start, end: of the whole list, on the same clock.
        sent_bytes: to other GPUs.
        grad_norm, learning_rate: of the optimizer's step, if there was one.
    """

    losses: dict[str, float] = field(default_factory=dict)
    runs: list[TimedRun] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    sent_bytes: int = 0
    grad_norm: float | None = None
    learning_rate: float | None = None


class Mode(NamedTuple):
    """The mode that a submodule trains in: frozen ones are in evaluation mode."""

    module: nn.Module
    training: bool

    def apply(self, training: bool) -> None:
        """Set it; evaluation mode for everything where not ``training``."""
        self.module.training = training and self.training


@dataclass
class Device:
    """What stays from iteration to iteration.

    Attributes:
        device: of the tensors.
        graph: of all nodes.
        specs, modules: of the nodes here.
        modes: of all submodules, as they were built.
        pool, side_by_side: streams and threads.
        messages: to other GPUs; None where there are none.
        optimizer: of the parameters here.
        layouts: by layout key and producer.
    """

    device: torch.device
    graph: NodeGraph
    specs: Mapping[str, NodeSpec]
    modules: Mapping[str, nn.Module]
    modes: Sequence[Mode]
    pool: StreamPool
    side_by_side: SideBySide
    messages: Messages | None
    optimizer: RankOptimizer
    layouts: dict[tuple[str, str], Layout]


class _Made(NamedTuple):
    """A part that went forward: what it handed on, its leaves, and the forward itself."""

    values: Tensors
    leaves: dict[tuple[str, bool], Tensors]
    output: Output


class _Incoming(NamedTuple):
    """A part of the gradient of a part's output."""

    samples: Range
    gradients: Tensors
    works: list[dist.Work]


class Iteration:
    """Carries out one GPU's instructions.

    Args:
        here: the GPU.
        program: its instructions.
        meta: of the iteration.
        entries: per part, its samples of the batch's entries that the node reads.
    """

    def __init__(
        self,
        here: Device,
        program: GpuProgram,
        meta: IterationMeta,
        entries: Mapping[Part, Mapping[str, torch.Tensor]],
    ) -> None:
        self._here, self._program, self._meta, self._entries = here, program, meta, entries
        self._samples: dict[str, Samples] = {}
        self._made: dict[Part, _Made] = {}
        self._incoming: dict[Part, list[tuple[int, _Incoming]]] = {}
        self._losses: dict[str, list[torch.Tensor]] = {}
        self._clock = RunClock(here.device)
        self.result = IterationResult()

    def run(self) -> IterationResult:
        """The whole list.

        Raises:
            ModuleError: a node raised, by name.
        """
        here, meta = self._here, self._meta
        self.result.start = time.time()
        for mode in here.modes:
            mode.apply(meta.training)
        sent = here.messages.sent_bytes if here.messages else 0
        if meta.training:
            here.optimizer.zero_grad()
            here.optimizer.reduction.expect(here.modules)
        actions = {
            Run: self._run, Route: self._route, Barrier: self._barrier, Reduce: self._reduce,
            Finish: self._finish, Update: self._update,
        }
        for one in self._program.instructions:
            actions[type(one)](one)
        if here.messages:
            here.messages.wait_sent()
            self.result.sent_bytes = here.messages.sent_bytes - sent
        self.result.losses = {
            name: float(sum(value.double() for value in values))
            for name, values in self._losses.items()
        }
        self.result.runs = self._clock.runs()
        self.result.end = time.time()
        return self.result

    # Runs

    def _run(self, run: Run) -> None:
        work = self._forward if run.direction is Direction.FORWARD else self._backward
        works = {part.node: work(run, part) for part in run.parts}
        streams = self._here.pool.select(self._program.turns[run.turn].name)
        outputs = self._here.side_by_side.run(streams, works)
        for part in run.parts:
            value = outputs[part.node].get()
            if run.direction is Direction.FORWARD:
                tensors, leaves = value
                self._made[part] = _Made(tensors, leaves, outputs[part.node])
                if self._here.specs[part.node].loss:
                    self._losses.setdefault(part.node, []).append(tensors[ONLY].detach())
            else:
                for (producer, every), gradients in value.items():
                    samples = Range(0, self._program.batch) if every else part.samples
                    self._samples[producer].add_gradient(samples, gradients)
                del self._made[part]

    def _forward(self, run: Run, part: Part) -> Work:
        here, meta = self._here, self._meta
        spec, module = here.specs[part.node], here.modules[part.node]
        backward = meta.training and part.node in here.graph.backward
        given: dict[tuple[str, bool], Tensors] = {}
        for one in spec.inputs:
            held = self._samples[one.producer]
            held.wait()
            samples = Range(0, self._program.batch) if one.every else part.samples
            given[one.producer, one.every] = held.values(samples)
        layouts = {producer: self._samples[producer].layout for producer, _ in given}
        draws = self._draws(part.node)
        seed = derive_seed(meta.seed, meta.step, part.node, part.samples.lo) if draws else None

        def forward(entries: Tensors, given: dict[tuple[str, bool], Tensors]) -> Any:
            with self._clock.timing(run, part.node), torch.set_grad_enabled(backward):
                leaves = {
                    place: _leaves(tensors, layouts[place[0]], backward)
                    for place, tensors in given.items()
                }
                inputs = {p: t for (p, every), t in leaves.items() if not every}
                every = {p: t for (p, every), t in leaves.items() if every}
                tensors = call(spec, module, entries, inputs, every, part.samples)
                if spec.loss:
                    tensors = {ONLY: tensors[ONLY].sum() * meta.scales[part.node]}
                return tensors, leaves if backward else {}

        return Work(forward, (self._entries.get(part, {}), given), draws=draws, seed=seed)

    def _backward(self, run: Run, part: Part) -> Work:
        here = self._here
        spec, made = here.specs[part.node], self._made[part]
        gradients = None if spec.loss else self._gradient(part, made.values)

        def backward(values: Tensors, gradients: Tensors | None) -> Any:
            with self._clock.timing(run, part.node):
                if gradients is None:
                    values[ONLY].backward()
                elif gradients:
                    torch.autograd.backward(
                        [values[name] for name in gradients], list(gradients.values())
                    )
            return {
                place: {n: t.grad for n, t in leaves.items() if t.grad is not None}
                for place, leaves in made.leaves.items()
                if place[0] in here.graph.backward
            }

        return Work(
            backward, (made.values, gradients), draws=self._draws(part.node),
            backward_of=made.output,
        )

    def _draws(self, node: str) -> bool:
        draws = self._here.specs[node].draws
        if draws is not None:
            return draws
        return self._meta.training and self._here.graph.by_name[node].trainable

    def _gradient(self, part: Part, values: Tensors) -> Tensors:
        """The sum of what readers have of a part's gradient, in the order of their GPUs."""
        total = {name: torch.zeros_like(t) for name, t in values.items() if t.requires_grad}
        for _, one in sorted(self._incoming.pop(part, []), key=lambda pair: pair[0]):
            for work in one.works:
                work.wait()
            lo = one.samples.lo - part.samples.lo
            for name, gradient in one.gradients.items():
                total[name][lo : lo + one.samples.size].add_(gradient)
        return total

    # Routes

    def _route(self, route: Route) -> None:
        if route.direction is Direction.FORWARD:
            self._route_outputs(route)
        else:
            self._route_gradients(route)

    def _route_outputs(self, route: Route) -> None:
        layouts = self._layouts(route)
        me, sends = self._program.gpu, []
        for piece in route.sends:
            tensors = self._piece(piece)
            sends += [(piece.peer, tensor) for tensor in tensors.values()]
        receives: list[tuple[Samples, int, torch.Tensor]] = []
        for piece in route.receives:
            node = piece.node
            if node not in self._samples:
                self._samples[node] = Samples(
                    layouts[node], self._program.needs[node], self._here.device
                )
            held = self._samples[node]
            if piece.peer == me:
                held.put(piece.samples, self._piece(piece))
            else:
                receives += [(held, piece.peer, t) for t in held.values(piece.samples).values()]
        works = self._start(sends, [(peer, tensor) for _, peer, tensor in receives])
        for (held, _, _), one in zip(receives, works, strict=True):
            held.await_writes(one)

    def _layouts(self, route: Route) -> dict[str, Layout]:
        """Layouts of what is received. The first time, others tell."""
        key, cache, me = self._meta.layout, self._here.layouts, self._program.gpu
        for node, samples in {(p.node, p.samples) for p in self._own_pieces(route)}:
            layout = Layout.of(self._part_with(node, samples)[1].values)
            known = cache.setdefault((key, node), layout)
            if known != layout:
                raise OutputError(
                    f"outputs of {node!r} are {layout.fields}, and were {known.fields} for inputs "
                    "of the same shapes; accepted: shapes that follow from those of the batch"
                )
        if self._meta.new_layout:
            device = self._here.device
            pairs = dict.fromkeys((p.node, p.peer) for p in route.sends)
            sends = [(peer, cache[key, node].encode().to(device)) for node, peer in pairs]
            wanted = dict.fromkeys((p.node, p.peer) for p in route.receives if p.peer != me)
            receives = [
                (peer, torch.empty(LAYOUT_BYTES, dtype=torch.uint8, device=device))
                for _, peer in wanted
            ]
            works = self._start(sends, receives)
            for (node, _), (_, data), waits in zip(wanted, receives, works, strict=True):
                for work in waits:
                    work.wait()
                cache[key, node] = Layout.decode(data)
        return {p.node: cache[key, p.node] for p in route.receives}

    def _own_pieces(self, route: Route) -> list[Piece]:
        return [*route.sends, *(p for p in route.receives if p.peer == self._program.gpu)]

    def _part_with(self, node: str, samples: Range) -> tuple[Part, _Made]:
        for part, made in self._made.items():
            if part.node == node and part.samples.holds(samples):
                return part, made
        raise IndexError(f"samples {samples} of {node!r} were not made here")

    def _piece(self, piece: Piece) -> Tensors:
        part, made = self._part_with(piece.node, piece.samples)
        lo = piece.samples.lo - part.samples.lo
        return {name: t[lo : lo + piece.samples.size] for name, t in made.values.items()}

    def _route_gradients(self, route: Route) -> None:
        me = self._program.gpu
        sends = []
        for piece in route.sends:
            gradients = self._samples[piece.node].gradient(piece.samples)
            sends += [(piece.peer, gradient) for gradient in gradients.values()]
        coming: list[tuple[Piece, Tensors]] = []
        for piece in route.receives:
            if piece.peer == me:
                gradients = self._samples[piece.node].gradient(piece.samples)
                self._expect(piece, gradients, [])
            else:
                layout = Layout.of(self._part_with(piece.node, piece.samples)[1].values)
                buffers = empty(layout.gradients, piece.samples.size, self._here.device)
                coming.append((piece, buffers))
        works = iter(self._start(
            sends, [(piece.peer, t) for piece, buffers in coming for t in buffers.values()]
        ))
        for piece, buffers in coming:
            self._expect(piece, buffers, [work for _ in buffers for work in next(works)])

    def _expect(self, piece: Piece, gradients: Tensors, works: list[dist.Work]) -> None:
        part, _ = self._part_with(piece.node, piece.samples)
        one = _Incoming(piece.samples, gradients, works)
        self._incoming.setdefault(part, []).append((piece.peer, one))

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[list[dist.Work]]:  # fmt: skip
        if not sends and not receives:
            return []
        return self._here.messages.start(sends, receives)

    # The rest

    def _barrier(self, _: Barrier) -> None:
        if self._here.messages is not None:
            if self._here.device.type == "cuda":
                torch.cuda.synchronize(self._here.device)
            dist.barrier()

    def _reduce(self, one: Reduce) -> None:
        for node in one.nodes:
            self._here.optimizer.reduction.finished(node)

    def _finish(self, _: Finish) -> None:
        self._here.optimizer.reduction.wait()

    def _update(self, _: Update) -> None:
        self.result.grad_norm = self._here.optimizer.clip()
        self.result.learning_rate = self._here.optimizer.step()


def _leaves(tensors: Tensors, layout: Layout, backward: bool) -> Tensors:
    """The same values, apart from whatever made them; with gradients of their own."""
    grads = {field.name for field in layout.gradients} if backward else set()
    return {name: t.detach().requires_grad_(name in grads) for name, t in tensors.items()}
