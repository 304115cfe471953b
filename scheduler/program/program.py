"""Programs: what each rank does in one step, as lists of small frozen instructions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from raymm.errors import Error
from raymm.scheduler.plan.rank_quotas import ROUNDING
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId


class Op(StrEnum):
    """What an instruction does. ``edge`` below is a directed pair of stages."""

    FORWARD = "forward"  # run a stage on a microbatch and keep what its backward needs
    FORWARD_NO_GRAD = "forward_no_grad"  # run it under no_grad: nothing is kept
    FORWARD_CHECKPOINTED = "forward_checkpointed"  # run it and keep only its inputs
    RECOMPUTE = "recompute"  # run a checkpointed forward again, keeping what backward needs
    BACKWARD = "backward"  # gradients of inputs and parameters, whichever are due
    BACKWARD_INPUT = "backward_input"  # B_d: gradients of inputs only; B_w follows
    BACKWARD_WEIGHT = "backward_weight"  # B_w: gradients of parameters, after B_d
    SEND = "send"  # start sending what the stage produced for the edge; never blocks
    RECV = "recv"  # wait until the edge's next message is here
    REDUCE_GRADS = "reduce_grads"  # sum gradients of parameters that live on two ranks
    CLIP_GRADS = "clip_grads"  # scale gradients by the norm over all ranks
    STEP = "step"  # optimizer update, then zero gradients


FORWARDS = frozenset({Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED})
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
COMPUTE = FORWARDS | BACKWARDS | {Op.RECOMPUTE}
OPTIMIZER_OPS = (Op.REDUCE_GRADS, Op.CLIP_GRADS, Op.STEP)


class Instruction(NamedTuple):
    """One instruction. ``stage`` and ``microbatch`` say what it works on; ``peer`` is the
    stage at the other end of a SEND or RECV (a gradient travels from consumer to producer,
    so its edge is the data edge reversed).

    Compute instructions of one ``group`` (a number, unique on the rank) stand next to each other
    and run concurrently: one module's in their order, each module on its ``quota``, the share of
    the rank's multiprocessors. All begin when all before them has ended, and nothing after them
    begins before all have ended. Without a group (-1) an instruction has the whole device."""

    op: Op
    stage: StageId = NO_STAGE
    microbatch: int = -1
    peer: StageId = NO_STAGE
    group: int = -1
    quota: float = 1.0

    @property
    def edge(self) -> Edge:
        """(from stage, to stage) of a SEND or RECV."""
        return (self.stage, self.peer) if self.op is Op.SEND else (self.peer, self.stage)

    def __str__(self) -> str:
        where = f" {self.stage}" if self.stage.module else ""
        which = f" #{self.microbatch}" if self.microbatch >= 0 else ""
        arrow = {Op.SEND: f" -> {self.peer}", Op.RECV: f" <- {self.peer}"}.get(self.op, "")
        beside = f" (group {self.group}, quota {self.quota:g})" if self.group >= 0 else ""
        return f"{self.op.value}{where}{arrow}{which}{beside}"


def group_end(instructions: Sequence[Any], index: int) -> int:
    """One past the last instruction (or task) of the group of ``instructions[index]``; of one
    without a group, the next."""
    group, end = instructions[index].group, index + 1
    while group >= 0 and end < len(instructions) and instructions[end].group == group:
        end += 1
    return end


class Program(NamedTuple):
    """One step: per rank, its instructions in order."""

    ranks: tuple[tuple[Instruction, ...], ...]

    def __iter__(self) -> Iterator[tuple[Instruction, ...]]:  # type: ignore[override]
        return iter(self.ranks)

    def with_optimizer_ops(self, ops: tuple[Op, ...]) -> Program:
        """The same program, followed on every rank by ``ops`` (collective, so on all)."""
        tail = tuple(Instruction(op) for op in ops)
        return Program(tuple(rank + tail for rank in self.ranks))

    def __str__(self) -> str:
        return "\n".join(
            f"rank {index}:\n" + "\n".join(f"  {instruction}" for instruction in rank)
            for index, rank in enumerate(self.ranks)
        )


class ProgramError(Error, ValueError):
    """A program that would hang, mix up messages, or use what is not there."""


@dataclass(frozen=True)
class ProgramReport:
    """What :func:`check_program` proved. ``live_activations`` is, per stage, the largest
    number of microbatches whose activations live at once."""

    live_activations: dict[StageId, int]


def check_program(program: Program) -> ProgramReport:
    """Prove that a program runs to its end, before anything starts.

    Sends never block; a receive blocks until the matching send was issued, a collective
    until every rank is in it. Shown here: every RECV has its SEND, with the same
    microbatch, in the same order on the same edge; no message is left over; no set of
    ranks waits in a circle; a backward follows its own forward and runs once; outputs and
    gradients are computed before they are sent and received before they are used;
    collective instructions come in the same order on every rank; of every group, what
    :func:`check_groups` says. Whether a program lacks
    both ends of a message that the model needs cannot be seen without the plan.

    Raises:
        ProgramError: naming rank and instruction.
    """
    collectives = [
        tuple(i.op for i in rank if i.op in OPTIMIZER_OPS) for rank in program.ranks
    ]
    for rank, ops in enumerate(collectives):
        if ops != collectives[0]:
            raise ProgramError(f"rank {rank} runs collectives {ops}, rank 0 {collectives[0]}")

    for rank, instructions in enumerate(program.ranks):
        check_groups(rank, instructions)
    position = [0] * len(program.ranks)
    queues: dict[Edge, deque[int]] = defaultdict(deque)
    done: set[tuple[str, StageId, int]] = set()
    live: dict[StageId, int] = defaultdict(int)
    peak: dict[StageId, int] = defaultdict(int)
    home: dict[StageId, int] = {}
    met: set[tuple[StageId, int, StageId]] = set()
    progressed = True
    while progressed:
        progressed = _meet(program, position)
        for rank, instructions in enumerate(program.ranks):
            while position[rank] < len(instructions):
                instruction = instructions[position[rank]]
                if instruction.op in OPTIMIZER_OPS:
                    break
                if home.setdefault(instruction.stage, rank) != rank:
                    raise ProgramError(
                        f"rank {rank}: {instruction}, but stage {instruction.stage} is on "
                        f"rank {home[instruction.stage]}"
                    )
                if instruction.op is Op.RECV:
                    if not queues[instruction.edge]:
                        break
                    sent = queues[instruction.edge].popleft()
                    if sent != instruction.microbatch:
                        raise ProgramError(
                            f"rank {rank}: {instruction} would get microbatch {sent} instead"
                        )
                    _check_message(rank, instruction, done, met)
                elif instruction.op is Op.SEND:
                    _check_message(rank, instruction, done, met)
                    queues[instruction.edge].append(instruction.microbatch)
                elif instruction.op in COMPUTE:
                    _check_compute(rank, instruction, done, live, peak)
                position[rank] += 1
                progressed = True
    for rank, instructions in enumerate(program.ranks):
        if position[rank] < len(instructions):
            raise ProgramError(
                f"deadlock: rank {rank} waits forever in {instructions[position[rank]]}"
            )
    for edge, queue in queues.items():
        if queue:
            raise ProgramError(f"edge {edge[0]} -> {edge[1]}: nobody receives {list(queue)}")
    for stage, count in live.items():
        if count:
            raise ProgramError(f"stage {stage}: {count} forward(s) never get their backward")
    return ProgramReport(live_activations=dict(peak))


def check_groups(rank: int, instructions: Sequence[Instruction]) -> None:
    """Turns are of compute instructions next to each other, on quotas that a device has; a
    backward runs where the forward that kept its activations ran, because autograd runs it on
    that one's stream. Whether one instruction of a group needs another's result cannot be seen
    without the plan.

    Raises:
        ProgramError: naming rank and instruction.
    """
    quotas: dict[int, dict[str, float]] = {}
    kept: dict[tuple[StageId, int], Instruction] = {}
    last = -1
    for one in instructions:
        if one.group >= 0:
            in_group = quotas.setdefault(one.group, {})
            if one.op not in COMPUTE:
                raise ProgramError(f"rank {rank}: {one}; only compute instructions have groups")
            if in_group and last != one.group:
                raise ProgramError(f"rank {rank}: {one} stands apart from others of its group")
            in_group[one.stage.module] = one.quota
            if sum(in_group.values()) > 1 + ROUNDING:
                raise ProgramError(f"rank {rank}: {one} brings the quotas of its group above 1")
        last = one.group
        place = one.stage, one.microbatch
        if one.op in (Op.FORWARD, Op.RECOMPUTE):
            kept[place] = one
        elif one.op in BACKWARDS and place in kept:
            before = kept[place]
            if (before.group >= 0, before.quota) != (one.group >= 0, one.quota):
                raise ProgramError(f"rank {rank}: {one} is not on the quota of {before}")


def _meet(program: Program, position: list[int]) -> bool:
    """Step over a collective once every rank has come to it."""
    if not program.ranks or any(
        at == len(rank) or rank[at].op not in OPTIMIZER_OPS
        for rank, at in zip(program.ranks, position, strict=True)
    ):
        return False
    for rank in range(len(position)):
        position[rank] += 1
    return True


def _check_message(
    rank: int,
    instruction: Instruction,
    done: set[tuple[str, StageId, int]],
    met: set[tuple[StageId, int, StageId]],
) -> None:
    """A stage's first message with a peer about a microbatch carries its output or input,
    the second a gradient. ``met`` holds the first ones."""
    op, stage, microbatch, peer, *_ = instruction
    direction = "backward" if (stage, microbatch, peer) in met else "forward"
    met.add((stage, microbatch, peer))
    computed = (direction, stage, microbatch) in done
    if op is Op.SEND and not computed:
        raise ProgramError(f"rank {rank}: {instruction} before its {direction}")
    if op is Op.RECV and computed:
        raise ProgramError(f"rank {rank}: {instruction} after its {direction}")
    if op is Op.RECV and direction == "backward" and ("forward", stage, microbatch) not in done:
        raise ProgramError(f"rank {rank}: {instruction} before its forward")


# What each op does to (stage, microbatch): the phases it needs, and the one it completes. A
# gradient can be sent after "backward", which BACKWARD and BACKWARD_INPUT complete.
_PHASE = {
    Op.FORWARD: "forward",
    Op.FORWARD_NO_GRAD: "forward",
    Op.FORWARD_CHECKPOINTED: "forward",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward",
    Op.BACKWARD_WEIGHT: "weight",
}


def _check_compute(
    rank: int,
    instruction: Instruction,
    done: set[tuple[str, StageId, int]],
    live: dict[StageId, int],
    peak: dict[StageId, int],
) -> None:
    op, stage, microbatch, *_ = instruction
    phase = _PHASE[op]

    def is_done(what: str) -> bool:
        return (what, stage, microbatch) in done

    if is_done(phase):
        raise ProgramError(f"rank {rank}: {instruction} runs twice")
    done.add((phase, stage, microbatch))
    if op in FORWARDS:
        peak.setdefault(stage, 0)
        if op is Op.FORWARD_NO_GRAD:
            return
        done.add(("kept" if op is Op.FORWARD else "checkpointed", stage, microbatch))
        live[stage] += 1
        peak[stage] = max(peak[stage], live[stage])
        return
    if not is_done("forward"):
        raise ProgramError(f"rank {rank}: {instruction} before its forward")
    if op is Op.RECOMPUTE:
        if not is_done("checkpointed"):
            raise ProgramError(f"rank {rank}: {instruction}, but its forward kept no inputs")
        done.add(("kept", stage, microbatch))
        return
    if not is_done("kept"):
        missing = "was not recomputed" if is_done("checkpointed") else "kept nothing"
        raise ProgramError(f"rank {rank}: {instruction}, but its forward {missing}")
    if op is Op.BACKWARD_WEIGHT and not is_done("split"):
        raise ProgramError(f"rank {rank}: {instruction} before its backward_input")
    if op is Op.BACKWARD_INPUT:
        done.add(("split", stage, microbatch))  # lives on until its backward_weight
    else:
        live[stage] -= 1
