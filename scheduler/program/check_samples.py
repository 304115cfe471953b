"""Proof that every sample is used once, for programs in which replicas split microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range, overlap, union
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import FORWARDS, Instruction, Op, Program
from raymm.scheduler.program.stage_samples import Samples, carried_samples, needed_samples

_HANDS_BACK = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})
_Place = tuple[str, int, int]  # module, index, microbatch


def check_samples(plan: Plan, program: Program, samples: Sequence[Samples]) -> None:
    """Prove that every sample is used once in a program that has passed
    :func:`~raymm.scheduler.program.check_program.check_program`. Raise ``InternalError`` naming
    rank and instruction if a rule is violated:

    - every sample of a microbatch passes once through every module of the microbatch;
    - a stage gets every sample that it reads once, from its producer, and receives no sample
      of microbatches that it does not run;
    - both ends of a message have the same samples; a backward has the samples of its forward;
    - for every sample whose gradient a stage sends back, every rank that read the sample has
      contributed its gradient once, after the last of its stages that read it.
    """
    check = _Check(plan, program, samples)
    for rank, instructions in enumerate(program.ranks):
        _Rank(check, rank).play(instructions)
    check.ended()


class _Check:
    """Checks over all ranks; ``of`` has the samples of each microbatch, ``ran`` the (stage,
    microbatch) pairs with a forward."""

    def __init__(self, plan: Plan, program: Program, samples: Sequence[Samples]) -> None:
        self.plan, self.of = plan, samples
        self.ran = {
            (i.stage, i.microbatch) for rank in program for i in rank if i.op in FORWARDS
        }
        self._of_module: dict[_Place, list[Range]] = {}
        self._sent: dict[Edge, deque[tuple[Range, ...]]] = {}
        self._received: dict[Edge, deque[tuple[Range, ...]]] = {}

    def samples(self, instruction: Instruction) -> tuple[Range, ...]:
        return instruction.samples or (Range(0, self.of[instruction.microbatch].size),)

    def message(self, instruction: Instruction) -> None:
        ends = self._sent if instruction.op is Op.SEND else self._received
        ends.setdefault(instruction.edge, deque()).append(self.samples(instruction))

    def forward(self, instruction: Instruction) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        key = stage.module, stage.index, microbatch
        self._of_module.setdefault(key, []).extend(self.samples(instruction))

    def readers(self, stage: StageId, microbatch: int) -> dict[int, tuple[Range, ...]]:
        """Return the samples of a stage's output that each rank reads."""
        plan, samples = self.plan, self.of[microbatch]
        read: dict[int, list[Range]] = {}
        for consumer in plan.stage_consumers[stage]:
            if (consumer, microbatch) in self.ran:
                needed = needed_samples(plan, stage.module, plan.by_id[consumer], samples)
                read.setdefault(plan.by_id[consumer].rank, []).extend(needed)
        return {rank: union(ranges) for rank, ranges in read.items()}

    def ended(self) -> None:
        """Raise ``InternalError`` if a module misses or repeats a sample, or the ends of a message
        differ."""
        for (module, index, microbatch), ranges in self._of_module.items():
            if not _tiles(ranges, has := self.of[microbatch].of(module)):
                raise InternalError(
                    f"{module}.{index} #{microbatch} runs on samples {_listed(ranges)}; it must "
                    f"run on each of {_listed(has)} once"
                )
        for edge in self._sent.keys() | self._received.keys():
            sent, received = self._sent.get(edge), self._received.get(edge)
            if sent != received:
                raise InternalError(
                    f"edge {edge[0]} -> {edge[1]}: sent {sent}, received {received}"
                )


class _Rank:
    """State of one rank, updated instruction by instruction."""

    def __init__(self, check: _Check, rank: int) -> None:
        self._check, self._rank = check, rank
        self._arrived: dict[_Place, list[Range]] = {}
        self._forwards: dict[tuple[StageId, int], tuple[Range, ...]] = {}
        self._gradients: dict[tuple[StageId, int], dict[int, tuple[Range, ...]]] = {}
        self._backwards: set[tuple[StageId, int]] = set()

    def play(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            forward = instruction.direction is Direction.FORWARD
            if instruction.op in FORWARDS:
                self._forward(instruction)
            elif instruction.op in _HANDS_BACK:
                self._backward(instruction)
            elif instruction.op is Op.RECV:
                self._check.message(instruction)
                (self._receive if forward else self._receive_gradient)(instruction)
            elif instruction.op is Op.SEND:
                self._check.message(instruction)
                owing = [] if forward else self._owing(instruction.peer, instruction.microbatch)
                if owing:
                    raise self._error(
                        instruction, f"before the backward of {', '.join(map(str, owing))}"
                    )

    def _error(self, instruction: Instruction, what: str) -> InternalError:
        return InternalError(f"rank {self._rank}: {instruction} {what}")

    def _receive(self, instruction: Instruction) -> None:
        if (instruction.stage, instruction.microbatch) not in self._check.ran:
            raise self._error(instruction, "is for a stage that does not run the microbatch")
        key = instruction.peer.module, instruction.peer.index, instruction.microbatch
        self._arrived.setdefault(key, []).extend(self._check.samples(instruction))

    def _forward(self, instruction: Instruction) -> None:
        check, microbatch = self._check, instruction.microbatch
        stage = check.plan.by_id[instruction.stage]
        producers = check.plan.stage_producers[stage.id]
        for module, index in dict.fromkeys((p.module, p.index) for p in producers):
            if not any((p, microbatch) in check.ran for p in producers if p.module == module):
                continue  # the microbatch has no data for it
            needed = needed_samples(check.plan, module, stage, check.of[microbatch])
            ranges = [
                common for r in self._arrived.get((module, index, microbatch), ())
                for n in needed if (common := r.meet(n))
            ]
            if not _tiles(ranges, needed):
                raise self._error(
                    instruction, f"has samples {_listed(ranges)} of {module}; it must have "
                    f"each of {_listed(needed)} once"
                )
        check.forward(instruction)
        key = stage.module, stage.index, microbatch
        self._arrived.setdefault(key, []).extend(check.samples(instruction))
        self._forwards[stage.id, microbatch] = check.samples(instruction)

    def _receive_gradient(self, instruction: Instruction) -> None:
        rank = self._check.plan.by_id[instruction.peer].rank
        ranks = self._gradients.setdefault((instruction.stage, instruction.microbatch), {})
        if rank in ranks:
            raise self._error(instruction, f"is the second gradient from rank {rank}")
        ranks[rank] = self._check.samples(instruction)

    def _owing(self, producer: StageId, microbatch: int) -> list[StageId]:
        """Return the consumers of a stage on this rank that have not run their backward."""
        plan, samples = self._check.plan, self._check.of[microbatch]
        return [
            c for c in plan.stage_consumers[producer]
            if plan.by_id[c].rank == self._rank and (c, microbatch) in self._check.ran
            and (c, microbatch) not in self._backwards
            and carried_samples(plan, producer, [c], samples)
        ]

    def _backward(self, instruction: Instruction) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        samples = self._check.samples(instruction)
        if samples != self._forwards.get((stage, microbatch)):
            raise self._error(instruction, "has other samples than its forward")
        due = {
            rank: overlap(ranges, samples)
            for rank, ranges in self._check.readers(stage, microbatch).items()
        }
        due = {rank: ranges for rank, ranges in due.items() if ranges}
        if due.pop(self._rank, None) and (owing := self._owing(stage, microbatch)):
            raise self._error(instruction, f"before the backward of {', '.join(map(str, owing))}")
        ranks = self._gradients.pop((stage, microbatch), {})
        if ranks != due:
            raise self._error(instruction, f"has gradients by rank {ranks}; they must be {due}")
        self._backwards.add((stage, microbatch))


def _tiles(ranges: Sequence[Range], whole: Sequence[Range]) -> bool:
    """Return True if ``ranges`` (in any order) has each sample of ``whole`` (ascending ranges that
    do not touch) once, and no others."""
    ordered = sorted(ranges)
    disjoint = all(a.hi <= b.lo for a, b in zip(ordered, ordered[1:], strict=False))
    return disjoint and union(ordered) == tuple(whole)


def _listed(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{lo}:{hi}" for lo, hi in ranges) or "none"
