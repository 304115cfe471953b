"""One iteration of one GPU: its instructions one after another, and when each module ran."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from raymm.actors.faults.whereabouts import Whereabouts
from raymm.actors.modules.node import ONLY, NodeInputs, Tensors
from raymm.actors.modules.seeds import derive_seed
from raymm.actors.multiplexed.clock import RunClock
from raymm.actors.multiplexed.device import Device
from raymm.actors.multiplexed.iteration_meta import GpuProgram, IterationMeta, IterationResult
from raymm.actors.multiplexed.routes import PartOutput, Routes
from raymm.actors.multiplexed.samples import Layout
from raymm.actors.quota import Work
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Finish,
    Part,
    Reduce,
    Route,
    Run,
    Update,
)
from raymm.scheduler.plan.stage import StageId


class Iteration:
    """Carries out one GPU's instructions.

    Args:
        device: the GPU, with its modules.
        program: its instructions.
        meta: of the iteration.
        entries: per part, what its node reads of the batch.
        whereabouts: is told every instruction.
    """

    def __init__(
        self,
        device: Device,
        program: GpuProgram,
        meta: IterationMeta,
        entries: Mapping[Part, Mapping[str, torch.Tensor]],
        whereabouts: Whereabouts,
    ) -> None:
        self._whereabouts = whereabouts
        self._device, self._program, self._meta, self._entries = device, program, meta, entries
        self._routes = Routes(device, program, meta)
        self._losses: dict[str, list[torch.Tensor]] = {}
        self._clock = RunClock(device.device)
        self.result = IterationResult()

    def run(self) -> IterationResult:
        """The whole list.

        Raises:
            ModuleError: a node raised, by name.
        """
        device, meta = self._device, self._meta
        self.result.start = time.time()
        for mode in device.modes:
            mode.apply(meta.training)
        sent = device.messages.sent_bytes if device.messages else 0
        if meta.training and not meta.keep_gradients:
            device.optimizer.zero_grad()
        if meta.training and meta.microbatch == 0:
            device.optimizer.observer.begin()
        instructions = self._program.instructions
        if any(isinstance(instruction, Finish) for instruction in instructions):
            device.optimizer.reduction.expect(map(StageId, device.modules))
        actions = {
            Run: self._run, Route: self._routes.run, Barrier: self._barrier, Reduce: self._reduce,
            Finish: self._finish, Update: self._update,
        }
        for instruction in instructions:
            self._whereabouts.enter(instruction)
            actions[type(instruction)](instruction)
        if device.messages:
            device.messages.wait_sent()
            self.result.sent_bytes = device.messages.sent_bytes - sent
        self.result.losses = {
            name: float(sum(value.double() for value in values))
            for name, values in self._losses.items()
        }
        self.result.runs = self._clock.runs()
        self.result.end = time.time()
        return self.result

    def _run(self, run: Run) -> None:
        # Of samples that a node has nothing to do for (a tower of a modality that they lack),
        # all GPUs know from the offsets.
        parts = [part for part in run.parts if self._meta.rows(part.node, part.samples)]
        work = self._forward if run.direction is Direction.FORWARD else self._backward
        works = {part.node: work(run, part) for part in parts}
        if not works:
            return
        streams = self._device.pool.select(self._program.slots[run.slot].name)
        outputs = self._device.concurrent_modules.run(streams, works)
        for part in parts:
            value = outputs[part.node].get()
            if run.direction is Direction.FORWARD:
                tensors, leaves = value
                self._routes.outputs[part] = PartOutput(tensors, leaves, outputs[part.node])
                rows = self._meta.rows(part.node, part.samples)
                self._note("output", part, tensors, part.node, rows)
                if self._device.specs[part.node].loss:
                    self._losses.setdefault(part.node, []).append(tensors[ONLY].detach())
                    if self._meta.training:
                        self._device.optimizer.observer.loss(tensors[ONLY])
            else:
                for (producer, every), gradients in value.items():
                    rows = self._read_rows(part, producer, every)
                    self._routes.samples[producer].add_gradient(rows, gradients)
                    self._note("gradient", part, gradients, producer, rows)
                del self._routes.outputs[part]

    def _note(
        self, kind: Literal["output", "gradient"], part: Part, tensors: Tensors, of: str,
        rows: Range,
    ) -> None:  # fmt: skip
        if self._meta.training:
            count = self._meta.rows(of, Range(0, self._program.batch)).size
            self._device.optimizer.observer.saw(
                kind, StageId(part.node), self._meta.microbatch, tensors.values(), StageId(of),
                rows, count,
            )

    def _read_rows(self, part: Part, producer: str, every: bool) -> Range:
        """Which rows of a producer's output a part reads."""
        samples = Range(0, self._program.batch) if every else part.samples
        return self._meta.rows(producer, samples)

    def _forward(self, run: Run, part: Part) -> Work:
        device, meta = self._device, self._meta
        spec, module = device.specs[part.node], device.modules[part.node]
        backward = meta.training and part.node in device.graph.backward
        read: dict[tuple[str, bool], Tensors] = {}
        for entry in spec.inputs:
            if rows := self._read_rows(part, entry.producer, entry.every):
                samples = self._routes.samples[entry.producer]
                samples.wait()
                read[entry.producer, entry.every] = samples.values(rows)
        layouts = {producer: self._routes.samples[producer].layout for producer, _ in read}
        draws, seed = self._draws(part.node), None
        if draws:
            batch = ("batch", meta.batch) if meta.batch else ()
            seed = derive_seed(
                meta.seed, meta.step, part.node, part.samples.lo, meta.microbatch, *batch
            )

        def forward(entries: Tensors, read: dict[tuple[str, bool], Tensors]) -> Any:
            with (
                self._clock.timing(run, part.node), torch.set_grad_enabled(backward),
                self._precision(),
            ):
                leaves = {
                    place: _leaves(tensors, layouts[place[0]], backward)
                    for place, tensors in read.items()
                }
                inputs = {p: t for (p, every), t in leaves.items() if not every}
                every = {p: t for (p, every), t in leaves.items() if every}
                tensors = spec.run(module, NodeInputs(
                    entries, inputs, every, part.samples, meta.rows(part.node, part.samples),
                    self._counts(part), meta.context(part.samples),
                ))
                if spec.loss:
                    tensors = {ONLY: tensors[ONLY].sum() * meta.scales[part.node]}
                return tensors, leaves if backward else {}

        return Work(forward, (self._entries.get(part, {}), read), draws=draws, seed=seed)

    def _counts(self, part: Part) -> dict[str, tuple[int, ...]]:
        """How many rows the samples of a part have, by producer that has not one each."""
        counts = {}
        for entry in self._device.specs[part.node].inputs:
            if (offsets := self._meta.offsets.get(entry.producer)) is not None:
                edges = offsets[part.samples.lo : part.samples.hi + 1]
                counts[entry.producer] = tuple(b - a for a, b in pairwise(edges))
        return counts

    def _precision(self) -> AbstractContextManager:
        if self._device.autocast is None:
            return nullcontext()
        # Without a cache, as of ThreadSettings: it would be that of all threads.
        return torch.autocast(self._device.device.type, self._device.autocast, cache_enabled=False)

    def _backward(self, run: Run, part: Part) -> Work:
        device = self._device
        spec, output = device.specs[part.node], self._routes.outputs[part]
        gradients = None if spec.loss else self._routes.gradient(part, output.values)

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
                for place, leaves in output.leaves.items()
                if place[0] in device.graph.backward
            }

        return Work(
            backward, (output.values, gradients), draws=self._draws(part.node),
            backward_of=output.output,
        )

    def _draws(self, node: str) -> bool:
        draws = self._device.specs[node].draws
        if draws is not None:
            return draws
        return self._meta.training and any(self._device.graph.node(node).trainable)

    def _barrier(self, _: Barrier) -> None:
        if self._device.messages is not None:
            if self._device.device.type == "cuda":
                torch.cuda.synchronize(self._device.device)
            dist.barrier()

    def _reduce(self, reduce: Reduce) -> None:
        for node in reduce.nodes:
            self._device.optimizer.reduction.finished(StageId(node))
            self._device.optimizer.reduction.begin((StageId(node),))

    def _finish(self, _: Finish) -> None:
        self._device.optimizer.reduction.wait()

    def _update(self, _: Update) -> None:
        optimizer = self._device.optimizer
        optimizer.clip()
        optimizer.step()
        update = optimizer.finish()
        self.result.grad_norm, self.result.learning_rate = update.grad_norm, update.learning_rate
        self.result.not_finite = update.not_finite


def _leaves(tensors: Tensors, layout: Layout, backward: bool) -> Tensors:
    """The same values, apart from whatever made them; with gradients of their own."""
    grads = {field.name for field in layout.gradients} if backward else set()
    # Not detach(): with data, a change in place counts in the reader's own tensor only, so that
    # it is known whose it was while others read the same values.
    return {name: t.data.requires_grad_(name in grads) for name, t in tensors.items()}
