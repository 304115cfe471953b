"""Proof that a program ends, and the order in which processes begin their communication."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import MESSAGE_BOUND, Direction
from raymm.scheduler.plan.rank_quotas import ROUNDING
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.issue_order import Issue, SharedGradients
from raymm.scheduler.program.program import (
    BACKWARDS,
    COMPUTE,
    OPTIMIZER_OPS,
    Instruction,
    Op,
    Program,
)

# Bits for the operations of a stage on a microbatch; each may run once.
FORWARD_DONE = 1
_KEPT = 2  # a forward or recomputation that kept what the backward needs
_CHECKPOINTED = 4  # a forward that kept only its inputs
_RECOMPUTED = 8
BACKWARD_DONE = 16  # backward of the inputs: their gradient can be sent
_SPLIT = 32  # the backward of the parameters is still to come
_WEIGHT = 64

_FORWARDS = {
    Op.FORWARD: FORWARD_DONE | _KEPT,
    Op.FORWARD_CHECKPOINTED: FORWARD_DONE | _CHECKPOINTED,
    Op.FORWARD_NO_GRAD: FORWARD_DONE,
}
_LATER = {Op.RECOMPUTE: _RECOMPUTED, Op.BACKWARD: BACKWARD_DONE, Op.BACKWARD_INPUT: BACKWARD_DONE,
          Op.BACKWARD_WEIGHT: _WEIGHT}  # fmt: skip


class StageState:
    """Progress of a stage: its rank, the bits above by microbatch, current and largest number of
    microbatches with live activations (-1 before the first), and seconds by operation."""

    __slots__ = ("done", "live", "peak", "rank", "seconds")

    def __init__(self, rank: int, seconds: dict[Op, float]) -> None:
        self.rank = rank
        self.done: dict[int, int] = {}
        self.live, self.peak = 0, -1
        self.seconds = seconds

    def compute(self, instruction: Instruction) -> None:
        """Run a compute instruction. Raise ``InternalError`` naming the rank if the instruction
        runs twice, or before what it needs."""
        op, microbatch, rank = instruction.op, instruction.microbatch, self.rank
        done = self.done.get(microbatch, 0)
        forward = _FORWARDS.get(op)
        if forward is not None:
            if done & FORWARD_DONE:
                raise InternalError(f"rank {rank}: {instruction} runs twice")
            self.done[microbatch] = forward
            if forward != FORWARD_DONE:
                self.live += 1
            self.peak = max(self.peak, self.live)
            return
        later = _LATER[op]
        if done & later:
            raise InternalError(f"rank {rank}: {instruction} runs twice")
        if not done & FORWARD_DONE:
            raise InternalError(f"rank {rank}: {instruction} before its forward")
        if op is Op.RECOMPUTE:
            if not done & _CHECKPOINTED:
                raise InternalError(f"rank {rank}: {instruction}, but its forward kept no inputs")
            self.done[microbatch] = done | _RECOMPUTED | _KEPT
            return
        if not done & _KEPT:
            missing = "was not recomputed" if done & _CHECKPOINTED else "kept nothing"
            raise InternalError(f"rank {rank}: {instruction}, but its forward {missing}")
        if op is Op.BACKWARD_WEIGHT and not done & _SPLIT:
            raise InternalError(f"rank {rank}: {instruction} before its backward_input")
        if op is Op.BACKWARD_INPUT:
            later |= _SPLIT  # activations stay live until backward_weight
        else:
            self.live -= 1
        self.done[microbatch] = done | later


@dataclass(frozen=True)
class ProgramReport:
    """Result of :func:`check_program`.

    Attributes:
        live_activations: largest number of microbatches whose activations are live at once, per
            stage.
        issues: receives and gradient sums that each rank begins, in order, with the instruction
            before which each begins.
        bound: most messages of one edge in flight, sent and not yet received. A sender of another
            message waits until the first of them is received. None means any number.
    """

    live_activations: dict[StageId, int]
    issues: tuple[tuple[Issue, ...], ...]
    bound: int | None = None


# Relative durations where no costs are known.
_USUAL = {Op.FORWARD: 1.0, Op.FORWARD_CHECKPOINTED: 1.0, Op.FORWARD_NO_GRAD: 1.0,
          Op.RECOMPUTE: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0,
          Op.BACKWARD_WEIGHT: 1.0}  # fmt: skip


def check_program(
    program: Program,
    shared: Sequence[SharedGradients] = (),
    seconds: Mapping[tuple[StageId, Op], float] | None = None,
) -> ProgramReport:
    """Prove that a program runs to its end, before anything starts.

    The program is simulated: of all ranks that can proceed, the one with the earliest time executes
    its next instruction. A receive waits until the matching send was issued, a collective until
    every rank has reached it. The simulation checks:

    - every RECV has its SEND, with the same microbatch, in the same order on the same edge; no
      message is left over; no ranks wait for each other in a cycle;
    - a backward follows its own forward and runs once; outputs and gradients are computed before
      they are sent, and received before they are used;
    - collective instructions have the same order on every rank;
    - the rules of :func:`check_groups`.

    A message that is missing at both ends cannot be detected without the plan.

    **With gloo** the program ends because a send blocks while :attr:`ProgramReport.bound` messages
    of its edge are in flight, and the simulation is such a run. A program that would deadlock that
    way (several chunks per rank and many microbatches) is simulated again without a bound.

    **With NCCL**, a message waits for both ends, a sum for all of its members, and any operation
    may delay all operations that its process issues later. The program ends if receives and sums
    begin at the instructions in :attr:`ProgramReport.issues`. Then the receiver of a message issues
    its end when the simulated sender issues its own, and all members issue a sum at the same
    simulated time, so all processes issue their communication in one global order. The first
    unfinished operation of that order is the first unfinished one on each of its processes, so
    nothing delays it, and its inputs come before it in the simulation. This holds for any
    assignment of messages to communicators, of communicators to streams, and of streams to hardware
    queues, and even if every operation blocks the host until it is done.

    Args:
        program: with or without the collectives at its end.
        shared: parameters whose gradients are summed over ranks, in an order common to all ranks.
        seconds: durations by stage and operation, which order independent instructions; by default
            backwards take twice as long as forwards.

    Raises:
        InternalError: a check failed; the message names rank and instruction.
    """
    for rank, instructions in enumerate(program.ranks):
        check_groups(rank, instructions)
    bound: int | None = MESSAGE_BOUND
    play = _Play(program, shared, seconds or {}, bound)
    play.run()
    if play.is_stuck:
        bound = None
        play = _Play(program, shared, seconds or {}, bound)
        play.run()
    play.check_ended()
    return ProgramReport(
        {stage: state.peak for stage, state in play.stages.items() if state.peak >= 0},
        tuple(map(tuple, play.issues)),
        bound,
    )


@dataclass
class _Shared:
    """Shared gradients: number of the last instruction that adds to them, by rank, and the number
    of ranks (``left``) that have not reached it."""

    stages: tuple[StageId, ...]
    ranks: tuple[int, ...]
    last: dict[int, int] = field(default_factory=dict)
    left: int = 0

    def finish_rank(self) -> bool:
        """Record that a rank has reached its last instruction; return True for the last rank."""
        self.left -= 1
        return not self.left


class _Edge:
    """Messages of an edge in flight, the receiving rank, whether it waits for the next message, and
    the rank that is blocked while sending (-1 for none)."""

    __slots__ = ("blocked", "receiver", "sent", "waiting")

    def __init__(self, receiver: int) -> None:
        self.receiver = receiver
        self.sent: deque[Instruction] = deque()
        self.waiting = False
        self.blocked = -1

    def send(self, instruction: Instruction) -> bool:
        """Append a message; return True if the receiver waited for it."""
        self.sent.append(instruction)
        waited, self.waiting = self.waiting, False
        return waited

    def wait(self) -> None:
        self.waiting = True

    def block(self, rank: int) -> None:
        self.blocked = rank

    def unblock(self) -> int:
        """Return the rank that was blocked while sending, which may now continue."""
        rank, self.blocked = self.blocked, -1
        return rank


class _Play:
    """Simulated run of a program. ``stages`` and ``issues`` are the results."""

    def __init__(
        self, program: Program, shared: Sequence[SharedGradients],
        seconds: Mapping[tuple[StageId, Op], float], bound: int | None,
    ) -> None:
        self._program = program
        self._bound = sys.maxsize if bound is None else bound
        self._position = [0] * len(program.ranks)
        self._times = [0.0] * len(program.ranks)
        self._events = [(0.0, rank) for rank in range(len(program.ranks))]
        self._edges: dict[Edge, _Edge] = {}
        self._seconds: dict[StageId, dict[Op, float]] = {}
        for (stage, op), value in seconds.items():
            self._seconds.setdefault(stage, dict(_USUAL))[op] = value
        self.stages: dict[StageId, StageState] = {}
        self.issues: list[list[Issue]] = [[] for _ in program.ranks]
        # Per rank, the shared gradients that are complete after the instruction of this number.
        self._completes: list[dict[int, list[_Shared]]] = [{} for _ in program.ranks]
        self._homes = self._receivers()
        self._find_last(shared)

    def _receivers(self) -> dict[Edge, int]:
        return {
            (i.peer, i.stage): rank
            for rank, instructions in enumerate(self._program.ranks)
            for i in instructions if i.op is Op.RECV
        }

    def _find_last(self, shared: Sequence[SharedGradients]) -> None:
        if not shared:
            return
        last: dict[tuple[StageId, int], int] = {}
        for rank, instructions in enumerate(self._program.ranks):
            for number, instruction in enumerate(instructions):
                if instruction.op in BACKWARDS:
                    last[instruction.stage.first_replica, rank] = number
        for stages, ranks in shared:
            state = _Shared(stages, ranks)
            for rank in ranks:
                numbers = [last[stage, rank] for stage in stages if (stage, rank) in last]
                if numbers:
                    state.last[rank] = max(numbers)
                    self._completes[rank].setdefault(max(numbers), []).append(state)
            state.left = len(state.last)

    def run(self) -> None:
        """Run until no rank can proceed."""
        while self._events:
            while self._events:
                now, rank = heapq.heappop(self._events)
                self._times[rank] = now
                self._advance(rank, now)
            self._meet()

    def _advance(self, rank: int, now: float) -> None:
        """Run the instructions of a rank until it has computed or has to wait."""
        instructions = self._program.ranks[rank]
        number, end = self._position[rank], len(instructions)
        while number < end:
            instruction = instructions[number]
            op = instruction.op
            if op is Op.RECV:
                if not self._receive(rank, instruction, now):
                    break
            elif op is Op.SEND:
                if not self._send(rank, instruction, now):
                    break
            elif op in OPTIMIZER_OPS:
                break
            else:
                state = self._state(rank, instruction)
                state.compute(instruction)
                now += state.seconds[op] / instruction.quota
                self._position[rank] = number + 1
                if number in self._completes[rank]:
                    self._complete(rank, number)
                if instruction.group < 0:
                    heapq.heappush(self._events, (now, rank))
                    return
            number += 1
            self._position[rank] = number

    def _state(self, rank: int, instruction: Instruction) -> StageState:
        stage = instruction.stage
        state = self.stages.get(stage)
        if state is None:
            state = self.stages[stage] = StageState(rank, self._seconds.get(stage, _USUAL))
        elif state.rank != rank:
            raise InternalError(
                f"rank {rank}: {instruction}, but stage {stage} is on rank {state.rank}"
            )
        return state

    def _send(self, rank: int, instruction: Instruction, now: float) -> bool:
        """Send the next message of an edge; return False if too many are in flight."""
        done = self._state(rank, instruction).done.get(instruction.microbatch, 0)
        direction = instruction.direction
        if not done & (FORWARD_DONE if direction is Direction.FORWARD else BACKWARD_DONE):
            raise InternalError(f"rank {rank}: {instruction} before its {direction}")
        edge = instruction.stage, instruction.peer
        messages = self._messages(edge)
        if len(messages.sent) == self._bound:
            messages.block(rank)
            return False
        waited = messages.send(instruction)
        receiver = messages.receiver
        if receiver >= 0:
            self.issues[receiver].append(Issue(self._position[receiver], edge))
        if waited:
            heapq.heappush(self._events, (now, receiver))
        return True

    def _messages(self, edge: Edge) -> _Edge:
        messages = self._edges.get(edge)
        if messages is None:
            messages = self._edges[edge] = _Edge(self._homes.get(edge, -1))
        return messages

    def _receive(self, rank: int, instruction: Instruction, now: float) -> bool:
        """Receive the next message of an edge; return False if it was not sent yet."""
        state = self._state(rank, instruction)
        messages = self._messages((instruction.peer, instruction.stage))
        if not messages.sent:
            messages.wait()
            return False
        sent = messages.sent.popleft()
        if messages.blocked >= 0:
            heapq.heappush(self._events, (now, messages.unblock()))
        direction = instruction.direction
        if sent.microbatch != instruction.microbatch:
            raise InternalError(
                f"rank {rank}: {instruction} would receive microbatch {sent.microbatch} instead"
            )
        if sent.direction is not direction:
            raise InternalError(
                f"rank {rank}: {instruction} is {direction}, {sent} is {sent.direction}"
            )
        done = state.done.get(instruction.microbatch, 0)
        if done & (FORWARD_DONE if direction is Direction.FORWARD else BACKWARD_DONE):
            raise InternalError(f"rank {rank}: {instruction} after its {direction}")
        if direction is Direction.BACKWARD and not done & FORWARD_DONE:
            raise InternalError(f"rank {rank}: {instruction} before its forward")
        return True

    def _complete(self, rank: int, number: int) -> None:
        """Record that a rank has finished its part of shared gradients. When the last rank has, the
        sum may begin: on this rank during the current instruction, on others where they are."""
        for shared in self._completes[rank][number]:
            if not shared.finish_rank():
                continue
            for member in shared.ranks:
                position, issues = self._position[member], self.issues[member]
                last = shared.last.get(member)  # None for a replica without work in this step
                if last is not None and position == last + 1:
                    if not issues or issues[-1].before <= last:
                        position = last  # nothing else began, so it may begin while that runs
                issues.append(Issue(position, stages=shared.stages))

    def _check_collectives(self) -> None:
        first, *later = (
            tuple(i.op for i in rank if i.op in OPTIMIZER_OPS) for rank in self._program
        )
        for rank, ops in enumerate(later, start=1):
            if ops != first:
                raise InternalError(f"rank {rank} runs collectives {ops}, rank 0 {first}")

    def _meet(self) -> None:
        """Step over a collective once every rank has reached it."""
        ranks, position = self._program.ranks, self._position
        next_ops = {
            rank[index].op if index < len(rank) else None
            for rank, index in zip(ranks, position, strict=True)
        }
        if len(next_ops) == 1 and next_ops <= set(OPTIMIZER_OPS):
            now = max(self._times, default=0.0)
            for rank in range(len(ranks)):
                position[rank] += 1
                heapq.heappush(self._events, (now, rank))

    @property
    def is_stuck(self) -> bool:
        """True if a rank is blocked while sending."""
        return any(messages.blocked >= 0 for messages in self._edges.values())

    def check_ended(self) -> None:
        """Raise ``InternalError`` if a rank waits forever, or a message or a forward has no
        counterpart."""
        if any(
            index < len(rank) for index, rank in zip(self._position, self._program, strict=True)
        ):
            self._check_collectives()
        for rank, instructions in enumerate(self._program.ranks):
            if self._position[rank] < len(instructions):
                stuck = instructions[self._position[rank]]
                raise InternalError(f"deadlock: rank {rank} waits forever in {stuck}")
        for edge, messages in self._edges.items():
            if messages.sent:
                unreceived = [sent.microbatch for sent in messages.sent]
                raise InternalError(f"edge {edge[0]} -> {edge[1]}: no rank receives {unreceived}")
        for stage, state in self.stages.items():
            if state.live:
                raise InternalError(
                    f"stage {stage}: {state.live} forward(s) have no backward"
                )


def check_groups(rank: int, instructions: Sequence[Instruction]) -> None:
    """Check that groups consist of adjacent compute instructions on quotas that fit on the device,
    and that each backward has the quota of the forward that kept its activations, because autograd
    runs it on the stream of that forward. Dependencies within a group are not checked; they need
    the plan. Raise ``InternalError`` naming rank and instruction."""
    if all(i.group < 0 and i.quota == 1.0 for i in instructions):
        return
    quotas: dict[int, dict[str, float]] = {}
    forwards: dict[tuple[StageId, int], Instruction] = {}
    last = -1
    for instruction in instructions:
        if instruction.group >= 0:
            in_group = quotas.setdefault(instruction.group, {})
            if instruction.op not in COMPUTE:
                raise InternalError(
                    f"rank {rank}: {instruction}; only compute instructions have groups"
                )
            if in_group and last != instruction.group:
                raise InternalError(
                    f"rank {rank}: {instruction} is separated from the others of its group"
                )
            in_group[instruction.stage.module] = instruction.quota
            if sum(in_group.values()) > 1 + ROUNDING:
                raise InternalError(
                    f"rank {rank}: {instruction} raises the quotas of its group above 1"
                )
        last = instruction.group
        key = instruction.stage, instruction.microbatch
        if instruction.op in (Op.FORWARD, Op.RECOMPUTE):
            forwards[key] = instruction
        elif instruction.op in BACKWARDS and key in forwards:
            forward = forwards[key]
            if (forward.group >= 0, forward.quota) != (instruction.group >= 0, instruction.quota):
                raise InternalError(f"rank {rank}: {instruction} has another quota than {forward}")
