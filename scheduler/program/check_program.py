"""Proves of a program that it ends, whatever it costs to wait, and says in which order processes
are to begin what they have with one another."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.errors import InternalError
from raymm.scheduler.graph.direction import MESSAGE_BOUND, Direction
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.check_groups import check_groups
from raymm.scheduler.program.issue_order import Issue, SharedGradients
from raymm.scheduler.program.program import BACKWARDS, OPTIMIZER_OPS, Instruction, Op, Program
from raymm.scheduler.program.stage_state import (
    BACKWARD_DONE,
    FORWARD_DONE,
    StageState,
    compute,
)


@dataclass(frozen=True)
class ProgramReport:
    """What :func:`check_program` proved.

    Attributes:
        live_activations: per stage, the largest number of microbatches whose activations live
            at once.
        issues: per rank, what it is to begin before which instruction, in order.
        bound: messages of one edge that may be under way, sent and not yet received: whoever sends
            another waits until the first of them is. None: any number.
    """

    live_activations: dict[StageId, int]
    issues: tuple[tuple[Issue, ...], ...]
    bound: int | None = None



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

    **It ends with gloo**, where a send blocks while :attr:`ProgramReport.bound` messages of its
    edge have been sent and not received: the play is such a run. A program that would not end so
    is played again without a bound (several chunks per rank and many microbatches).

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
        InternalError: naming rank and instruction.
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
    """Messages of an edge under way, who waits for the next one, who receives them, and the rank
    that waits to send another (-1: none does)."""

    __slots__ = ("blocked", "receiver", "sent", "waiting")

    def __init__(self, receiver: int) -> None:
        self.receiver = receiver
        self.sent: deque[Instruction] = deque()
        self.waiting = False
        self.blocked = -1


class _Play:
    """A run of a program on paper.

    Attributes:
        stages: what has been done, by stage.
        issues: per rank, what it is to begin where.
    """

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
                if not self._receive(rank, instruction, now):
                    break
            elif op is Op.SEND:
                if not self._send(rank, instruction, now):
                    break
            elif op in OPTIMIZER_OPS:
                break
            else:
                state = self._state(rank, instruction)
                compute(rank, instruction, state)
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
        """Send an edge's next message; False if there are too many under way."""
        done = self._state(rank, instruction).done.get(instruction.microbatch, 0)
        direction = instruction.direction
        if not done & (FORWARD_DONE if direction is Direction.FORWARD else BACKWARD_DONE):
            raise InternalError(f"rank {rank}: {instruction} before its {direction}")
        edge = instruction.stage, instruction.peer
        messages = self._messages(edge)
        if len(messages.sent) == self._bound:
            messages.blocked = rank
            return False
        messages.sent.append(instruction)
        receiver = messages.receiver
        if receiver >= 0:
            self.issues[receiver].append(Issue(self._position[receiver], edge))
        if messages.waiting:
            messages.waiting = False
            heapq.heappush(self._events, (now, receiver))
        return True

    def _messages(self, edge: Edge) -> _Edge:
        messages = self._edges.get(edge)
        if messages is None:
            messages = self._edges[edge] = _Edge(self._homes.get(edge, -1))
        return messages

    def _receive(self, rank: int, instruction: Instruction, now: float) -> bool:
        """Take the edge's next message; False if it is not there yet."""
        state = self._state(rank, instruction)
        messages = self._messages((instruction.peer, instruction.stage))
        if not messages.sent:
            messages.waiting = True
            return False
        sent = messages.sent.popleft()
        if messages.blocked >= 0:
            heapq.heappush(self._events, (now, messages.blocked))
            messages.blocked = -1
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
                raise InternalError(f"rank {rank} runs collectives {ops}, rank 0 {first}")

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

    @property
    def is_stuck(self) -> bool:
        """Whether a rank waits to send."""
        return any(messages.blocked >= 0 for messages in self._edges.values())

    def check_ended(self) -> None:
        """
        Raises:
            InternalError: a rank that waits for ever, or something that was begun and not ended.
        """
        if any(at < len(rank) for at, rank in zip(self._position, self._program, strict=True)):
            self._check_collectives()
        for rank, instructions in enumerate(self._program.ranks):
            if self._position[rank] < len(instructions):
                stuck = instructions[self._position[rank]]
                raise InternalError(f"deadlock: rank {rank} waits forever in {stuck}")
        for edge, messages in self._edges.items():
            if messages.sent:
                left = [sent.microbatch for sent in messages.sent]
                raise InternalError(f"edge {edge[0]} -> {edge[1]}: no rank receives {left}")
        for stage, state in self.stages.items():
            if state.live:
                raise InternalError(
                    f"stage {stage}: {state.live} forward(s) have no backward"
                )
