"""Proves of a multiplexed program that it ends and that every sample is used exactly once.

Samples that no range of the program tells apart have the same fate: of those between two bounds
that follow each other one is looked at, so the time does not depend on the size of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Finish,
    Instruction,
    MultiplexProgram,
    Part,
    Reduce,
    Route,
    Run,
    SampleTransfer,
)

_Samples = Counter[tuple[str, int]]  # (node, sample)


def check_program(graph: ModuleGraph, program: MultiplexProgram) -> None:
    """Play the program with messages that are handed over only when both sides are there, and sums
    of gradients that begin only when all replicas are: as NCCL has it where every operation
    holds up whatever its process issues after it.

    Raises:
        MultiplexError: naming the GPU and the instruction: processes that wait for each other, a
            message that only one side knows of, a node that runs without a sample that it reads,
            or a sample, or the gradient of one, that is missing or there twice.
    """
    try:
        check_every_sample(graph, _sample_of_each(program))
    except MultiplexError:
        check_every_sample(graph, program)  # to say it of the program's own samples
        raise


def check_every_sample(graph: ModuleGraph, program: MultiplexProgram) -> None:
    """:func:`check_program`, by looking at all samples: slow, and obviously right."""
    places = [_Process(graph, program, gpu) for gpu in range(program.gpus)]
    every = [instruction for listed in program.instructions for instruction in listed]
    reduces = any(isinstance(instruction, Finish) for instruction in every)
    trains = reduces or any(
        isinstance(instruction, Run) and instruction.direction is Direction.BACKWARD
        for instruction in every
    )
    while any(not place.ended for place in places):
        if not any(place.advance(places) for place in places):
            waiting = [f"GPU {p.gpu} at {p.current}" for p in places if not p.ended]
            raise MultiplexError(f"processes wait for each other: {'; '.join(waiting)}")
    for node in graph.nodes:
        directions = [Direction.FORWARD]
        if trains and node.name in graph.backward:
            directions.append(Direction.BACKWARD)
        for direction in Direction:
            due = int(direction in directions)
            total = sum((place.ran[direction] for place in places), Counter())
            for sample in range(program.batch):
                if total[node.name, sample] != due:
                    raise MultiplexError(
                        f"sample {sample} runs {total[node.name, sample]} times {direction} "
                        f"through {node.name!r}; it must be {due}"
                    )
        if reduces and any(node.trainable):
            summed = [place.gpu for place in places if node.name in place.reduced]
            if tuple(summed) != program.replicas[node.name]:
                raise MultiplexError(
                    f"GPUs {summed} sum the gradients of {node.name!r}; it must be those with a "
                    f"copy, {list(program.replicas[node.name])}"
                )


def _sample_of_each(program: MultiplexProgram) -> MultiplexProgram:
    """The same program of as many samples as its ranges tell apart."""
    listed = [instruction for instructions in program.instructions for instruction in instructions]
    ranges = [instruction for ranges in program.needs.values() for instruction in ranges]
    for instruction in listed:
        if isinstance(instruction, Run):
            ranges += [part.samples for part in instruction.parts]
        elif isinstance(instruction, Route):
            ranges += [transfer.samples for transfer in (*instruction.sends, *instruction.receives)]
    bounds = sorted({0, program.batch, *(bound for instruction in ranges for bound in instruction)})
    number = {bound: i for i, bound in enumerate(bounds)}

    def short(samples: Range) -> Range:
        return Range(number[samples.lo], number[samples.hi])

    def of(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Run):
            parts = tuple(Part(part.node, short(part.samples)) for part in instruction.parts)
            return replace(instruction, parts=parts)
        if isinstance(instruction, Route):
            sends, receives = (
                tuple(transfer._replace(samples=short(transfer.samples)) for transfer in transfers)
                for transfers in (instruction.sends, instruction.receives)
            )
            return replace(instruction, sends=sends, receives=receives)
        return instruction

    return replace(
        program, batch=number[program.batch],
        needs={place: tuple(map(short, ranges)) for place, ranges in program.needs.items()},
        instructions=tuple(tuple(map(of, instruction)) for instruction in program.instructions),
    )


def _sums_apart(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """The instructions with every sum of gradients as one of its own."""
    for instruction in instructions:
        if isinstance(instruction, Reduce):
            yield from (Reduce((node,)) for node in instruction.nodes)
        else:
            yield instruction


class _Process:
    """One GPU's process: where it is, and which samples it has."""

    def __init__(self, graph: ModuleGraph, program: MultiplexProgram, gpu: int) -> None:
        self.graph, self.program, self.gpu = graph, program, gpu
        self.list = tuple(_sums_apart(program.instructions[gpu]))
        self.at = 0
        self.ran: dict[Direction, _Samples] = {d: Counter() for d in Direction}
        self.has: dict[Direction, _Samples] = {d: Counter() for d in Direction}
        self.reduced: list[str] = []
        self.sends: dict[tuple[int, Direction], Route] = {
            (route.slot, route.direction): route for route in self.list
            if isinstance(route, Route)
        }

    @property
    def ended(self) -> bool:
        return self.at == len(self.list)

    @property
    def current(self) -> Instruction | None:
        return None if self.ended else self.list[self.at]

    def reached(self, place: tuple[type, int, Direction]) -> bool:
        """Whether it is at this instruction, or past it."""
        for i, instruction in enumerate(self.list):
            if isinstance(instruction, Route | Barrier):
                if (type(instruction), instruction.slot, instruction.direction) == place:
                    return i <= self.at
        return False

    def reached_sum(self, node: str) -> bool:
        """Whether it is at the sum of a node's gradients, or past it."""
        current = self.current
        at_it = isinstance(current, Reduce) and node in current.nodes
        return at_it or node in self.reduced

    def advance(self, places: list[_Process]) -> bool:
        """One instruction, if nobody has to be waited for."""
        instruction = self.current
        if instruction is None:
            return False
        if isinstance(instruction, Route):
            peers = {transfer.peer for transfer in (*instruction.sends, *instruction.receives)}
            key = (Route, instruction.slot, instruction.direction)
            if not all(p == self.gpu or places[p].reached(key) for p in peers):
                return False
            self._route(instruction, places)
        elif isinstance(instruction, Barrier):
            key = (Barrier, instruction.slot, instruction.direction)
            if not all(p.reached(key) for p in places):
                return False
        elif isinstance(instruction, Run):
            self._run(instruction)
        elif isinstance(instruction, Reduce):
            (node,) = instruction.nodes
            if not all(places[gpu].reached_sum(node) for gpu in self.program.replicas[node]):
                return False
            self.reduced.append(node)
        self.at += 1
        return True

    def _error(self, what: str) -> MultiplexError:
        return MultiplexError(f"GPU {self.gpu}, {self.current}: {what}")

    def _run(self, run: Run) -> None:
        for node, samples in run.parts:
            if node in self.reduced:
                raise self._error(f"the gradients of {node!r} are already being summed")
            for producer in self.graph.producers(node):
                every = (producer, node) in self.graph.every
                for sample in range(self.program.batch) if every else range(*samples):
                    if self.has[Direction.FORWARD][producer, sample] != 1:
                        raise self._error(f"{node!r} lacks sample {sample} of {producer!r}")
            for sample in range(*samples):
                if run.direction is Direction.BACKWARD:
                    if not self.ran[Direction.FORWARD][node, sample]:
                        raise self._error(f"sample {sample} of {node!r} had no forward")
                    readers = sum(
                        any(r.lo <= sample < r.hi for r in ranges)
                        for (name, _), ranges in self.program.needs.items() if name == node
                    )
                    if self.has[Direction.BACKWARD][node, sample] != readers:
                        raise self._error(
                            f"gradients of sample {sample} of {node!r} came from "
                            f"{self.has[Direction.BACKWARD][node, sample]} of {readers} GPUs"
                        )
                self.ran[run.direction][node, sample] += 1

    def _route(self, route: Route, places: list[_Process]) -> None:
        for transfer in route.sends:
            self._check_made(route.direction, transfer)
        for peer in {transfer.peer for transfer in (*route.sends, *route.receives)} - {self.gpu}:
            theirs = places[peer].sends[route.slot, route.direction]
            sent = [(p.node, p.samples) for p in theirs.sends if p.peer == self.gpu]
            due = [(p.node, p.samples) for p in route.receives if p.peer == peer]
            if sent != due:
                raise self._error(f"GPU {peer} sends {sent}, but {due} is expected")
        for transfer in route.receives:
            if transfer.peer == self.gpu:
                self._check_made(route.direction, transfer)
            for sample in range(*transfer.samples):
                self.has[route.direction][transfer.node, sample] += 1

    def _check_made(self, direction: Direction, transfer: SampleTransfer) -> None:
        """What is handed on is there, and complete."""
        if direction is Direction.FORWARD:
            for sample in range(*transfer.samples):
                if not self.ran[direction][transfer.node, sample]:
                    raise self._error(f"sample {sample} of {transfer.node!r} is sent unmade")
            return
        readers = self.graph.consumers(transfer.node)
        for instruction in self.list[self.at :]:
            if isinstance(instruction, Run) and instruction.direction is Direction.BACKWARD:
                if late := [part.node for part in instruction.parts if part.node in readers]:
                    raise self._error(
                        f"the gradient of {transfer.node!r} is sent before the backward of {late}"
                    )
