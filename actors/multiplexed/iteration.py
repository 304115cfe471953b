"""One iteration of one GPU's instructions: what it has made, what it has got, when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.faults.whereabouts import Whereabouts
from raymm.actors.modules.seeds import derive_seed
from raymm.actors.multiplexed.clock import RunClock
from raymm.actors.multiplexed.device import Device
from raymm.actors.multiplexed.incoming import Incoming, flagged
from raymm.actors.multiplexed.iteration_meta import GpuProgram, IterationMeta, IterationResult
from raymm.actors.multiplexed.messages import Messages
from raymm.actors.multiplexed.node import ONLY, Given, Tensors
from raymm.actors.multiplexed.samples import (
    LAYOUT_BYTES,
    KnownLayout,
    Layout,
    Samples,
    empty,
)
from raymm.actors.quota import Output, Work
from raymm.kernels.collectives.waiting import Waitable, wait
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Direction,
    Finish,
    Part,
    Reduce,
    Route,
    Run,
    SampleTransfer,
    Update,
)
from raymm.scheduler.plan.stage import StageId


class _Made(NamedTuple):
    """A part that went forward: what it handed on, its leaves, and the forward itself."""

    values: Tensors
    leaves: dict[tuple[str, bool], Tensors]
    output: Output


class Iteration:
    """Carries out one GPU's instructions.

    Args:
        here: the GPU.
        program: its instructions.
        meta: of the iteration.
        entries: per part, what its node reads of the batch.
        whereabouts: is told every instruction.
    """

    def __init__(
        self,
        here: Device,
        program: GpuProgram,
        meta: IterationMeta,
        entries: Mapping[Part, Mapping[str, torch.Tensor]],
        whereabouts: Whereabouts,
    ) -> None:
        self._whereabouts = whereabouts
        self._here, self._program, self._meta, self._entries = here, program, meta, entries
        self._samples: dict[str, Samples] = {}
        self._made: dict[Part, _Made] = {}
        self._incoming: dict[Part, list[tuple[int, Incoming]]] = {}
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
        if meta.training and not meta.keep_gradients:
            here.optimizer.zero_grad()
        if meta.training and meta.microbatch == 0:
            here.optimizer.observer.begin()
        if any(isinstance(one, Finish) for one in self._program.instructions):
            here.optimizer.reduction.expect(map(StageId, here.modules))
        actions = {
            Run: self._run, Route: self._route, Barrier: self._barrier, Reduce: self._reduce,
            Finish: self._finish, Update: self._update,
        }
        for one in self._program.instructions:
            self._whereabouts.enter(one)
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

    def _rows(self, part: Part | SampleTransfer) -> Range:
        return self._meta.rows(part.node, part.samples)

    def _run(self, run: Run) -> None:
        # Of samples that a node has nothing to do for (a tower of a modality that they lack),
        # all GPUs know from the offsets.
        parts = [part for part in run.parts if self._rows(part)]
        work = self._forward if run.direction is Direction.FORWARD else self._backward
        works = {part.node: work(run, part) for part in parts}
        if not works:
            return
        streams = self._here.pool.select(self._program.slots[run.slot].name)
        outputs = self._here.concurrent_modules.run(streams, works)
        for part in parts:
            value = outputs[part.node].get()
            if run.direction is Direction.FORWARD:
                tensors, leaves = value
                self._made[part] = _Made(tensors, leaves, outputs[part.node])
                self._note("output", part, tensors, part.node, self._rows(part))
                if self._here.specs[part.node].loss:
                    self._losses.setdefault(part.node, []).append(tensors[ONLY].detach())
                    if self._meta.training:
                        self._here.optimizer.observer.loss(tensors[ONLY])
            else:
                for (producer, every), gradients in value.items():
                    rows = self._read_rows(part, producer, every)
                    self._samples[producer].add_gradient(rows, gradients)
                    self._note("gradient", part, gradients, producer, rows)
                del self._made[part]

    def _note(
        self, kind: Literal["output", "gradient"], part: Part, tensors: Tensors, of: str,
        rows: Range,
    ) -> None:  # fmt: skip
        if self._meta.training:
            count = self._meta.rows(of, Range(0, self._program.batch)).size
            self._here.optimizer.observer.saw(
                kind, StageId(part.node), self._meta.microbatch, tensors.values(), StageId(of),
                rows, count,
            )

    def _read_rows(self, part: Part, producer: str, every: bool) -> Range:
        """Which rows of a producer's output a part reads."""
        samples = Range(0, self._program.batch) if every else part.samples
        return self._meta.rows(producer, samples)

    def _forward(self, run: Run, part: Part) -> Work:
        here, meta = self._here, self._meta
        spec, module = here.specs[part.node], here.modules[part.node]
        backward = meta.training and part.node in here.graph.backward
        given: dict[tuple[str, bool], Tensors] = {}
        for one in spec.inputs:
            if rows := self._read_rows(part, one.producer, one.every):
                held = self._samples[one.producer]
                held.wait()
                given[one.producer, one.every] = held.values(rows)
        layouts = {producer: self._samples[producer].layout for producer, _ in given}
        draws, seed = self._draws(part.node), None
        if draws:
            batch = ("batch", meta.batch) if meta.batch else ()
            seed = derive_seed(
                meta.seed, meta.step, part.node, part.samples.lo, meta.microbatch, *batch
            )

        def forward(entries: Tensors, given: dict[tuple[str, bool], Tensors]) -> Any:
            with (
                self._clock.timing(run, part.node), torch.set_grad_enabled(backward),
                self._precision(),
            ):
                leaves = {
                    place: _leaves(tensors, layouts[place[0]], backward)
                    for place, tensors in given.items()
                }
                inputs = {p: t for (p, every), t in leaves.items() if not every}
                every = {p: t for (p, every), t in leaves.items() if every}
                tensors = spec.run(module, Given(
                    entries, inputs, every, part.samples, self._rows(part), self._counts(part),
                    meta.context(part.samples),
                ))
                if spec.loss:
                    tensors = {ONLY: tensors[ONLY].sum() * meta.scales[part.node]}
                return tensors, leaves if backward else {}

        return Work(forward, (self._entries.get(part, {}), given), draws=draws, seed=seed)

    def _counts(self, part: Part) -> dict[str, tuple[int, ...]]:
        """How many rows the samples of a part have, by producer that has not one each."""
        found = {}
        for one in self._here.specs[part.node].inputs:
            if (offsets := self._meta.offsets.get(one.producer)) is not None:
                edges = offsets[part.samples.lo : part.samples.hi + 1]
                found[one.producer] = tuple(b - a for a, b in pairwise(edges))
        return found

    def _precision(self) -> AbstractContextManager:
        if self._here.autocast is None:
            return nullcontext()
        # Without a cache, as of ThreadSettings: it would be that of all threads.
        return torch.autocast(self._here.device.type, self._here.autocast, cache_enabled=False)

    def _backward(self, run: Run, part: Part) -> Work:
        here = self._here
        spec, made = here.specs[part.node], self._made[part]
        gradients = None if spec.loss else self._gradient(part, made.values)

        def backward(values: Tensors, gradients: Tensors | None) -> Any:
            with self._clock.timing(run, part.node):
                if gradients is None:
                    # Nothing is trained where what was read of towers is all that would be.
                    if values[ONLY].requires_grad:
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
        """The sum of what readers have of a part's gradient, in the order of their GPUs. Outputs
        that none has a gradient for are left out, as in one process: the optimizer leaves what
        only they depend on alone."""
        total: Tensors = {}
        for _, one in sorted(self._incoming.pop(part, []), key=lambda pair: pair[0]):
            one.add_to(total, values, self._rows(part).lo)
        return {name: total[name] for name in values if name in total}

    # Routes

    def _route(self, route: Route) -> None:
        if route.direction is Direction.FORWARD:
            self._route_outputs(route)
        else:
            self._route_gradients(route)

    def _route_outputs(self, route: Route) -> None:
        layouts = self._layouts(route)
        me, sends = self._program.gpu, []
        for piece in self._filled(route.sends):
            tensors = self._piece(piece)
            sends += [(piece.peer, tensor) for tensor in tensors.values()]
        receives: list[tuple[Samples, int, torch.Tensor]] = []
        for piece in self._filled(route.receives):
            node = piece.node
            if node not in self._samples:
                needed = (self._meta.rows(node, one) for one in self._program.needs[node])
                self._samples[node] = Samples(
                    layouts[node], [rows for rows in needed if rows], self._here.device
                )
            held, rows = self._samples[node], self._rows(piece)
            if piece.peer == me:
                held.put(rows, self._piece(piece))
            else:
                receives += [(held, piece.peer, t) for t in held.values(rows).values()]
        works = self._start(sends, [(peer, tensor) for _, peer, tensor in receives])
        for (held, _, _), one in zip(receives, works, strict=True):
            held.await_writes(one)

    def _layouts(self, route: Route) -> dict[str, Layout]:
        """Layouts of what is received. The first time, others tell.

        Raises:
            OutputError: GPUs, or this one at different times, say different things of a node.
        """
        key, cache, me = self._meta.layout, self._here.layouts, self._program.gpu

        def note(node: str, layout: Layout, gpu: int) -> None:
            known = cache.setdefault((key, node), KnownLayout(layout, gpu))
            known.check(node, layout, gpu)

        for node, samples in {(p.node, p.samples) for p in self._own_transfers(route)}:
            note(node, Layout.of(self._part_with(node, samples)[1].values), me)
        if self._meta.new_layout:
            device = self._here.device
            pairs = dict.fromkeys((p.node, p.peer) for p in self._filled(route.sends))
            sends = [(peer, cache[key, node].layout.encode().to(device)) for node, peer in pairs]
            wanted = dict.fromkeys(
                (p.node, p.peer) for p in self._filled(route.receives) if p.peer != me
            )
            receives = [
                (peer, torch.empty(LAYOUT_BYTES, dtype=torch.uint8, device=device))
                for _, peer in wanted
            ]
            works = self._start(sends, receives)
            for (node, peer), (_, data), waits in zip(wanted, receives, works, strict=True):
                for work in waits:
                    wait(work)
                note(node, Layout.decode(data), peer)
        return {p.node: cache[key, p.node].layout for p in self._filled(route.receives)}

    def _own_transfers(self, route: Route) -> list[SampleTransfer]:
        kept = [piece for piece in route.receives if piece.peer == self._program.gpu]
        return self._filled((*route.sends, *kept))

    def _filled(self, pieces: Sequence[SampleTransfer]) -> list[SampleTransfer]:
        """Those that there is anything of."""
        return [piece for piece in pieces if self._rows(piece)]

    def _part_with(self, node: str, samples: Range) -> tuple[Part, _Made]:
        for part, made in self._made.items():
            if part.node == node and part.samples.holds(samples):
                return part, made
        raise IndexError(f"samples {samples} of {node!r} were not made here")

    def _piece(self, piece: SampleTransfer) -> Tensors:
        part, made = self._part_with(piece.node, piece.samples)
        rows = self._rows(piece)
        lo = rows.lo - self._rows(part).lo
        return {name: t[lo : lo + rows.size] for name, t in made.values.items()}

    def _route_gradients(self, route: Route) -> None:
        me = self._program.gpu
        sends: list[tuple[int, torch.Tensor]] = []
        flags: dict[int, list[bool]] = {}
        for piece in self._filled(route.sends):
            held = self._samples[piece.node]
            for name, gradient in held.gradient(self._rows(piece)).items():
                sends.append((piece.peer, gradient))
                flags.setdefault(piece.peer, []).append(name in held.present)
        coming: list[tuple[SampleTransfer, Tensors]] = []
        for piece in self._filled(route.receives):
            if piece.peer == me:
                held = self._samples[piece.node]
                gradients, present = held.gradient(self._rows(piece)), frozenset(held.present)
                self._expect(piece, gradients, [], lambda present=present: present)
            else:
                layout = Layout.of(self._part_with(piece.node, piece.samples)[1].values)
                buffers = empty(layout.gradients, self._rows(piece).size, self._here.device)
                coming.append((piece, buffers))
        works = iter(self._start(
            sends, [(piece.peer, t) for piece, buffers in coming for t in buffers.values()]
        ))
        counts: Counter[int] = Counter()
        for piece, buffers in coming:
            counts[piece.peer] += len(buffers)
        told = self._messages.start_flags(flags, +counts) if flags or +counts else {}
        first: Counter[int] = Counter()
        for piece, buffers in coming:
            present = partial(flagged, told.get(piece.peer), first[piece.peer], tuple(buffers))
            first[piece.peer] += len(buffers)
            self._expect(piece, buffers, [w for _ in buffers for w in next(works)], present)

    @property
    def _messages(self) -> Messages:
        messages = self._here.messages
        assert messages is not None  # there is another GPU that something is sent to
        return messages

    def _expect(
        self, piece: SampleTransfer, gradients: Tensors, works: list[Waitable],
        present: Callable[[], frozenset[str]],
    ) -> None:  # fmt: skip
        part, _ = self._part_with(piece.node, piece.samples)
        one = Incoming(self._rows(piece), gradients, works, present)
        self._incoming.setdefault(part, []).append((piece.peer, one))

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[list[Waitable]]:  # fmt: skip
        if not sends and not receives:
            return []
        return self._messages.start(sends, receives)

    # The rest

    def _barrier(self, _: Barrier) -> None:
        if self._here.messages is not None:
            if self._here.device.type == "cuda":
                torch.cuda.synchronize(self._here.device)
            dist.barrier()

    def _reduce(self, one: Reduce) -> None:
        for node in one.nodes:
            self._here.optimizer.reduction.finished(StageId(node))

    def _finish(self, _: Finish) -> None:
        self._here.optimizer.reduction.wait()

    def _update(self, _: Update) -> None:
        self.result.grad_norm = self._here.optimizer.clip()
        self.result.not_finite = self._here.optimizer.not_finite
        self.result.learning_rate = self._here.optimizer.step()


def _leaves(tensors: Tensors, layout: Layout, backward: bool) -> Tensors:
    """The same values, apart from whatever made them; with gradients of their own."""
    grads = {field.name for field in layout.gradients} if backward else set()
    # Not detach(): with data, a change in place counts in the reader's own tensor only, so that
    # it is known whose it was while others read the same values.
    return {name: t.data.requires_grad_(name in grads) for name, t in tensors.items()}
