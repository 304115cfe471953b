"""Proves of a multiplexed program that it ends and that every sample is used exactly once.

Samples that no range of the program tells apart have the same fate: of those between two bounds
that follow each other one is looked at, so the time does not depend on the size of the batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from raymm.scheduler.graph.node_graph import NodeGraph
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Direction,
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


def check_program(graph: NodeGraph, program: MultiplexProgram) -> None:
    """Play the program with messages that are handed over only when both sides are there.

    Raises:
        MultiplexError: naming the GPU and the instruction: processes that wait for each other, a
            message that only one side knows of, a node that runs without a sample that it reads,
            or a sample, or the gradient of one, that is missing or there twice.
    """
    try:
        check_every_sample(graph, _one_of_each(program))
    except MultiplexError:
        check_every_sample(graph, program)  # to say it of the program's own samples
        raise


def check_every_sample(graph: NodeGraph, program: MultiplexProgram) -> None:
    """:func:`check_program`, by looking at all samples: slow, and obviously right."""
    places = [_Process(graph, program, gpu) for gpu in range(program.gpus)]
    every = [one for listed in program.instructions for one in listed]
    reduces = any(isinstance(one, Finish) for one in every)
    trains = reduces or any(
        isinstance(one, Run) and one.direction is Direction.BACKWARD for one in every
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
        if reduces and node.trainable:
            summed = [place.gpu for place in places if node.name in place.reduced]
            if tuple(summed) != program.replicas[node.name]:
                raise MultiplexError(
                    f"GPUs {summed} sum the gradients of {node.name!r}; it must be those with a "
                    f"copy, {list(program.replicas[node.name])}"
                )


def _one_of_each(program: MultiplexProgram) -> MultiplexProgram:
    """The same program of as many samples as its ranges tell apart."""
    listed = [one for instructions in program.instructions for one in instructions]
    ranges = [one for ranges in program.needs.values() for one in ranges]
    for one in listed:
        if isinstance(one, Run):
            ranges += [part.samples for part in one.parts]
        elif isinstance(one, Route):
            ranges += [piece.samples for piece in (*one.sends, *one.receives)]
    bounds = sorted({0, program.batch, *(bound for one in ranges for bound in one)})
    number = {bound: i for i, bound in enumerate(bounds)}

    def short(samples: Range) -> Range:
        return Range(number[samples.lo], number[samples.hi])

    def of(one: Instruction) -> Instruction:
        if isinstance(one, Run):
            return replace(one, parts=tuple(Part(p.node, short(p.samples)) for p in one.parts))
        if isinstance(one, Route):
            sends, receives = (
                tuple(piece._replace(samples=short(piece.samples)) for piece in pieces)
                for pieces in (one.sends, one.receives)
            )
            return replace(one, sends=sends, receives=receives)
        return one

    return replace(
        program, batch=number[program.batch],
        needs={place: tuple(map(short, ranges)) for place, ranges in program.needs.items()},
        instructions=tuple(tuple(map(of, one)) for one in program.instructions),
    )


class _Process:
    """One GPU's process: where it is, and which samples it has."""

    def __init__(self, graph: NodeGraph, program: MultiplexProgram, gpu: int) -> None:
        self.graph, self.program, self.gpu = graph, program, gpu
        self.list = program.instructions[gpu]
        self.at = 0
        self.ran: dict[Direction, _Samples] = {d: Counter() for d in Direction}
        self.has: dict[Direction, _Samples] = {d: Counter() for d in Direction}
        self.reduced: list[str] = []
        self.sends: dict[tuple[int, Direction], Route] = {
            (one.slot, one.direction): one for one in self.list if isinstance(one, Route)
        }

    @property
    def ended(self) -> bool:
        return self.at == len(self.list)

    @property
    def current(self) -> Instruction | None:
        return None if self.ended else self.list[self.at]

    def reached(self, wanted: tuple[type, int, Direction]) -> bool:
        """Whether it is at this instruction, or past it."""
        for i, one in enumerate(self.list):
            if isinstance(one, Route | Barrier):
                if (type(one), one.slot, one.direction) == wanted:
                    return i <= self.at
        return False

    def advance(self, places: list[_Process]) -> bool:
        """One instruction, if nobody has to be waited for."""
        one = self.current
        if one is None:
            return False
        if isinstance(one, Route):
            peers = {piece.peer for piece in (*one.sends, *one.receives)}
            key = (Route, one.slot, one.direction)
            if not all(p == self.gpu or places[p].reached(key) for p in peers):
                return False
            self._route(one, places)
        elif isinstance(one, Barrier):
            if not all(p.reached((Barrier, one.slot, one.direction)) for p in places):
                return False
        elif isinstance(one, Run):
            self._run(one)
        elif isinstance(one, Reduce):
            self.reduced += one.nodes
        self.at += 1
        return True

    def _error(self, what: str) -> MultiplexError:
        return MultiplexError(f"GPU {self.gpu}, {self.current}: {what}")

    def _run(self, run: Run) -> None:
        for node, samples in run.parts:
            if node in self.reduced:
                raise self._error(f"the gradients of {node!r} are already being summed")
            for use in self.graph.by_name[node].uses:
                every = range(self.program.batch)
                for sample in every if use.every else range(*samples):
                    if self.has[Direction.FORWARD][use.producer, sample] != 1:
                        raise self._error(f"{node!r} lacks sample {sample} of {use.producer!r}")
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
        for piece in route.sends:
            self._check_made(route.direction, piece)
        for peer in {piece.peer for piece in (*route.sends, *route.receives)} - {self.gpu}:
            theirs = places[peer].sends[route.slot, route.direction]
            sent = [(p.node, p.samples) for p in theirs.sends if p.peer == self.gpu]
            due = [(p.node, p.samples) for p in route.receives if p.peer == peer]
            if sent != due:
                raise self._error(f"GPU {peer} sends {sent}, but {due} is expected")
        for piece in route.receives:
            if piece.peer == self.gpu:
                self._check_made(route.direction, piece)
            for sample in range(*piece.samples):
                self.has[route.direction][piece.node, sample] += 1

    def _check_made(self, direction: Direction, piece: SampleTransfer) -> None:
        """What is handed on is there, and complete."""
        if direction is Direction.FORWARD:
            for sample in range(*piece.samples):
                if not self.ran[direction][piece.node, sample]:
                    raise self._error(f"sample {sample} of {piece.node!r} is sent unmade")
            return
        readers = {node.name for node in self.graph.readers(piece.node)}
        for one in self.list[self.at :]:
            if isinstance(one, Run) and one.direction is Direction.BACKWARD:
                if late := [part.node for part in one.parts if part.node in readers]:
                    raise self._error(
                        f"the gradient of {piece.node!r} is sent before the backward of {late}"
                    )
