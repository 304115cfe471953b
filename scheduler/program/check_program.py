"""Proves of a program that it ends, whatever it costs to wait, and says in which order processes
are to begin what they have with one another."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.check_groups import check_groups
from raymm.scheduler.program.issue_order import Issue, SharedGradients
from raymm.scheduler.program.program import (
    BACKWARDS,
    OPTIMIZER_OPS,
    Instruction,
    Op,
    Program,
    ProgramError,
)


@dataclass(frozen=True)
class ProgramReport:
    """What :func:`check_program` proved.

    Attributes:
        live_activations: per stage, the largest number of microbatches whose activations live
            at once.
        issues: per rank, what it is to begin before which instruction, in order.
    """

    live_activations: dict[StageId, int]
    issues: tuple[tuple[Issue, ...], ...]


# What can be done with a stage and a microbatch, each once, as bits.
_FORWARD = 1
_KEPT = 2  # a forward, or a recomputation, that kept what the backward needs
_CHECKPOINTED = 4  # a forward that kept its inputs
_RECOMPUTED = 8
_BACKWARD = 16  # of the inputs: their gradient can be sent
_SPLIT = 32  # such that that of the parameters is still to come
_WEIGHT = 64

_FORWARDS = {
    Op.FORWARD: _FORWARD | _KEPT,
    Op.FORWARD_CHECKPOINTED: _FORWARD | _CHECKPOINTED,
    Op.FORWARD_NO_GRAD: _FORWARD,
}
_LATER = {Op.RECOMPUTE: _RECOMPUTED, Op.BACKWARD: _BACKWARD, Op.BACKWARD_INPUT: _BACKWARD,
          Op.BACKWARD_WEIGHT: _WEIGHT}  # fmt: skip

# Seconds of what nobody knows the costs of, relative to one another.
_USUAL = {Op.FORWARD: 1.0, Op.FORWARD_CHECKPOINTED: 1.0, Op.FORWARD_NO_GRAD: 1.0,
          Op.RECOMPUTE: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0,
          Op.BACKWARD_WEIGHT: 1.0}  # fmt: skip


def check_program(
    program: Program,
    shared: Sequence[SharedGradients] = (),
    seconds: Mapping[tuple[StageId, Op], float] | None = None,
) -> ProgramReport:
    """Prove that a program runs to its end, before anything starts.

    The program is played: of all ranks that can go on, the one whose time it is does its next
    instruction. A receive waits until the matching send was issued, a collective until every rank
    is in it. Shown here: every RECV has its SEND, with the same microbatch, in the same order on
    the same edge; no message is left over; no set of ranks waits in a circle; a backward follows
    its own forward and runs once; outputs and gradients are computed before they are sent and
    received before they are used; collective instructions come in the same order on every rank;
    of every group, what :func:`check_groups` says. Whether a program lacks both ends of a message
    that the model needs cannot be seen without the plan.

    **It ends with gloo**, where a send never blocks: the play is such a run.

    **It ends with NCCL**, where a message waits for both ends, a sum for all of its members, and
    any operation may hold up whatever its process issues later: if receives and sums begin where
    :attr:`ProgramReport.issues` says. There the receiver issues its end of a message just when
    the sender of the play issues its own, and all members issue a sum at one time of the play, so
    everything that processes have with one another is issued everywhere in the one order of the
    play. The first operation of that order which is not done is the first on each of its
    processes, so nothing holds it up, and what its values are made of comes before it in the play.
    This holds however communicators are dealt out to messages, streams to communicators, and
    hardware queues to streams, and even if every operation blocks the host that issues it until it
    is done.

    Args:
        program: with the collectives at its end, or without.
        shared: parameters whose gradients ranks sum, in an order common to all of them.
        seconds: by stage and operation, for the order of what could begin in any; by default
            backwards take twice as long as forwards.

    Raises:
        ProgramError: naming rank and instruction.
    """
    for rank, instructions in enumerate(program.ranks):
        check_groups(rank, instructions)
    play = _Play(program, shared, seconds or {})
    play.run()
    play.check_ended()
    return ProgramReport(
        {stage: state.peak for stage, state in play.stages.items() if state.peak >= 0},
        tuple(map(tuple, play.issues)),
    )


class _StageState:
    """What has been done of a stage: the rank it is on, by microbatch the bits above, the number
    of microbatches whose activations live (-1: it has run nothing), and seconds by operation."""

    __slots__ = ("done", "live", "peak", "rank", "seconds")

    def __init__(self, rank: int, seconds: dict[Op, float]) -> None:
        self.rank = rank
        self.done: dict[int, int] = {}
        self.live, self.peak = 0, -1
        self.seconds = seconds


@dataclass
class _Shared:
    """Shared gradients.

    Attributes:
        stages, ranks: as in :class:`SharedGradients`.
        last: by rank, the number of the last instruction that adds to them.
        left: ranks that have not come to it.
    """

    stages: tuple[StageId, ...]
    ranks: tuple[int, ...]
    last: dict[int, int] = field(default_factory=dict)
    left: int = 0


class _Edge:
    """Messages of an edge under way, who waits for the next one, and who receives them."""

    __slots__ = ("receiver", "sent", "waiting")

    def __init__(self, receiver: int) -> None:
        self.receiver = receiver
        self.sent: deque[Instruction] = deque()
        self.waiting = False


class _Play:
    """A run of a program on paper.

    Attributes:
        stages: what has been done, by stage.
        issues: per rank, what it is to begin where.
    """

    def __init__(
        self, program: Program, shared: Sequence[SharedGradients],
        seconds: Mapping[tuple[StageId, Op], float],
    ) -> None:
        self._program = program
        self._position = [0] * len(program.ranks)
        self._times = [0.0] * len(program.ranks)
        self._events = [(0.0, rank) for rank in range(len(program.ranks))]
        self._edges: dict[Edge, _Edge] = {}
        self._seconds: dict[StageId, dict[Op, float]] = {}
        for (stage, op), value in seconds.items():
            self._seconds.setdefault(stage, dict(_USUAL))[op] = value
        self.stages: dict[StageId, _StageState] = {}
        self.issues: list[list[Issue]] = [[] for _ in program.ranks]
        # By rank and instruction, the shared gradients that are complete there once it has run.
        self._completes: list[dict[int, list[_Shared]]] = [{} for _ in program.ranks]
        self._homes = self._receivers()
        self._find_last(shared)

    def _receivers(self) -> dict[Edge, int]:
        """The rank that receives on each edge."""
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
        """Play until nobody can go on."""
        while self._events:
            while self._events:
                now, rank = heapq.heappop(self._events)
                self._times[rank] = now
                self._advance(rank, now)
            self._meet()

    def _advance(self, rank: int, now: float) -> None:
        """A rank's instructions until it has computed, or waits."""
        instructions = self._program.ranks[rank]
        number, end = self._position[rank], len(instructions)
        while number < end:
            instruction = instructions[number]
            op = instruction.op
            if op is Op.RECV:
                if not self._receive(rank, instruction):
                    break
            elif op is Op.SEND:
                self._send(rank, instruction, now)
            elif op in OPTIMIZER_OPS:
                break
            else:
                state = self._state(rank, instruction)
                _compute(rank, instruction, state)
                now += state.seconds[op] / instruction.quota
                self._position[rank] = number + 1
                if number in self._completes[rank]:
                    self._complete(rank, number)
                if instruction.group < 0:
                    heapq.heappush(self._events, (now, rank))
                    return
            number += 1
            self._position[rank] = number

    def _state(self, rank: int, instruction: Instruction) -> _StageState:
        stage = instruction.stage
        state = self.stages.get(stage)
        if state is None:
            state = self.stages[stage] = _StageState(rank, self._seconds.get(stage, _USUAL))
        elif state.rank != rank:
            raise ProgramError(
                f"rank {rank}: {instruction}, but stage {stage} is on rank {state.rank}"
            )
        return state

    def _send(self, rank: int, instruction: Instruction, now: float) -> None:
        done = self._state(rank, instruction).done.get(instruction.microbatch, 0)
        direction = instruction.direction
        if not done & (_FORWARD if direction is Direction.FORWARD else _BACKWARD):
            raise ProgramError(f"rank {rank}: {instruction} before its {direction}")
        edge = instruction.stage, instruction.peer
        messages = self._messages(edge)
        messages.sent.append(instruction)
        receiver = messages.receiver
        if receiver >= 0:
            self.issues[receiver].append(Issue(self._position[receiver], edge))
        if messages.waiting:
            messages.waiting = False
            heapq.heappush(self._events, (now, receiver))

    def _messages(self, edge: Edge) -> _Edge:
        messages = self._edges.get(edge)
        if messages is None:
            messages = self._edges[edge] = _Edge(self._homes.get(edge, -1))
        return messages

    def _receive(self, rank: int, instruction: Instruction) -> bool:
        """Take the edge's next message; False if it is not there yet."""
        state = self._state(rank, instruction)
        messages = self._messages((instruction.peer, instruction.stage))
        if not messages.sent:
            messages.waiting = True
            return False
        sent = messages.sent.popleft()
        direction = instruction.direction
        if sent.microbatch != instruction.microbatch:
            raise ProgramError(
                f"rank {rank}: {instruction} would get microbatch {sent.microbatch} instead"
            )
        if sent.direction is not direction:
            raise ProgramError(
                f"rank {rank}: {instruction} is {direction}, {sent} is {sent.direction}"
            )
        done = state.done.get(instruction.microbatch, 0)
        if done & (_FORWARD if direction is Direction.FORWARD else _BACKWARD):
            raise ProgramError(f"rank {rank}: {instruction} after its {direction}")
        if direction is Direction.BACKWARD and not done & _FORWARD:
            raise ProgramError(f"rank {rank}: {instruction} before its forward")
        return True

    def _complete(self, rank: int, number: int) -> None:
        """A rank computes the last that it has to add to shared gradients. If it is the last of
        all ranks, their sum may begin: here meanwhile, on the others where they are."""
        for shared in self._completes[rank][number]:
            shared.left -= 1
            if shared.left:
                continue
            for member in shared.ranks:
                before, issues = self._position[member], self.issues[member]
                last = shared.last.get(member, -1)
                if before == last + 1 and (not issues or issues[-1].before <= last):
                    before = last  # it has begun nothing since, so this may begin while that runs
                issues.append(Issue(before, stages=shared.stages))

    def _check_collectives(self) -> None:
        first, *others = (
            tuple(i.op for i in rank if i.op in OPTIMIZER_OPS) for rank in self._program
        )
        for rank, ops in enumerate(others, start=1):
            if ops != first:
                raise ProgramError(f"rank {rank} runs collectives {ops}, rank 0 {first}")

    def _meet(self) -> None:
        """Step over a collective if every rank has come to it."""
        ranks, position = self._program.ranks, self._position
        next_ops = {
            rank[at].op if at < len(rank) else None
            for rank, at in zip(ranks, position, strict=True)
        }
        if len(next_ops) == 1 and next_ops <= set(OPTIMIZER_OPS):
            now = max(self._times, default=0.0)
            for rank in range(len(ranks)):
                position[rank] += 1
                heapq.heappush(self._events, (now, rank))

    def check_ended(self) -> None:
        """
        Raises:
            ProgramError: a rank that waits for ever, or something that was begun and not ended.
        """
        if any(at < len(rank) for at, rank in zip(self._position, self._program, strict=True)):
            self._check_collectives()
        for rank, instructions in enumerate(self._program.ranks):
            if self._position[rank] < len(instructions):
                stuck = instructions[self._position[rank]]
                raise ProgramError(f"deadlock: rank {rank} waits forever in {stuck}")
        for edge, messages in self._edges.items():
            if messages.sent:
                left = [sent.microbatch for sent in messages.sent]
                raise ProgramError(f"edge {edge[0]} -> {edge[1]}: nobody receives {left}")
        for stage, state in self.stages.items():
            if state.live:
                raise ProgramError(
                    f"stage {stage}: {state.live} forward(s) never get their backward"
                )


def _compute(rank: int, instruction: Instruction, state: _StageState) -> None:
    op, microbatch = instruction.op, instruction.microbatch
    done = state.done.get(microbatch, 0)
    forward = _FORWARDS.get(op)
    if forward is not None:
        if done & _FORWARD:
            raise ProgramError(f"rank {rank}: {instruction} runs twice")
        state.done[microbatch] = forward
        if forward != _FORWARD:
            state.live += 1
        state.peak = max(state.peak, state.live)
        return
    later = _LATER[op]
    if done & later:
        raise ProgramError(f"rank {rank}: {instruction} runs twice")
    if not done & _FORWARD:
        raise ProgramError(f"rank {rank}: {instruction} before its forward")
    if op is Op.RECOMPUTE:
        if not done & _CHECKPOINTED:
            raise ProgramError(f"rank {rank}: {instruction}, but its forward kept no inputs")
        state.done[microbatch] = done | _RECOMPUTED | _KEPT
        return
    if not done & _KEPT:
        missing = "was not recomputed" if done & _CHECKPOINTED else "kept nothing"
        raise ProgramError(f"rank {rank}: {instruction}, but its forward {missing}")
    if op is Op.BACKWARD_WEIGHT and not done & _SPLIT:
        raise ProgramError(f"rank {rank}: {instruction} before its backward_input")
    if op is Op.BACKWARD_INPUT:
        later |= _SPLIT  # lives on until its backward_weight
    else:
        state.live -= 1
    state.done[microbatch] = done | later
