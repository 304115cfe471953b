"""Simulator: predicts a Timeline from a program and costs."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import MESSAGE_BOUND
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import COMPUTE, Instruction, Op, Program, group_end
from raymm.scheduler.program.timeline import Span, Timeline
from raymm.scheduler.schedule.network import Transfer

GroupSeconds = Callable[[Instruction, Mapping[str, float]], float]
"""Function of (instruction, quotas of the modules of its group, including its own) that returns the
instruction's seconds on its quota."""
_MESSAGES = frozenset({Op.SEND, Op.RECV})


def simulate(
    program: Program,
    costs: Mapping[tuple[StageId, Op], float],
    latency: float = 0.0,
    transfers: Mapping[Edge, Transfer] | None = None,
    microbatch_costs: Mapping[tuple[StageId, Op, int], float] | None = None,
    group_seconds: GroupSeconds | None = None,
    posted: int = 1,
    spans: Mapping[StageId, int] | None = None,
) -> Timeline:
    """Simulate a program.

    A rank with :data:`~raymm.scheduler.graph.module_graph.MESSAGE_BOUND` messages in flight on an
    edge waits before it sends another, as in a real run. If the program deadlocks that way, there
    is no bound (:func:`~raymm.scheduler.program.check_program.check_program`).

    Args:
        costs: seconds per (stage, compute op) on a whole device; 0 where missing.
        latency: seconds from a SEND until the message can be received, on edges that ``transfers``
            lacks.
        transfers: times of messages per directed edge. Messages of one edge are sent in sequence,
            concurrently with the rank's compute.
        microbatch_costs: seconds per (stage, compute op, microbatch); overrides ``costs``.
        group_seconds: seconds of instructions on quotas. Without it, time is inversely proportional
            to the quota (an upper bound: a module that does not fill a device loses less).
        posted: receives that the receiver of an edge posts ahead
            (:func:`~raymm.scheduler.graph.module_graph.posted_receives`; for a plan
            :attr:`~raymm.scheduler.plan.plan.Plan.posted_receives`). With 1, a message is in flight
            until it is received. With more, that many receives exist when the step begins, and each
            RECV posts another before it waits; for its sender, a message with a posted receive is
            no longer in flight.
        spans: groups of microbatches that share a forward and a backward
            (:func:`~raymm.scheduler.plan.microbatch_groups.group_spans`). The first forward and the
            last backward of a group take the time of all; the others take none.

    Returns:
        Compute spans and waits for messages. Collective instructions take no time.

    Raises:
        InternalError: the program deadlocks.
    """
    seconds = _Seconds(costs, microbatch_costs or {}, group_seconds)
    if spans:
        seconds = seconds._replace(of_microbatch=_joined(program, seconds, spans))
    arguments = seconds, Transfer(0.0, latency), transfers or {}
    timeline, waiting, delayed = _simulate(program, *arguments, MESSAGE_BOUND, 1)
    if waiting is not None:
        timeline, waiting, _ = _simulate(program, *arguments, sys.maxsize, 1)
    elif delayed and posted > 1:
        timeline, waiting, _ = _simulate(program, *arguments, MESSAGE_BOUND, posted)
    if waiting is not None:
        raise InternalError(waiting)
    return timeline


def _simulate(
    program: Program, seconds: _Seconds, usual: Transfer, transfers: Mapping[Edge, Transfer],
    bound: int, posted: int,
) -> tuple[Timeline, str | None, bool]:
    """Return the timeline, a text if a rank waits forever, and whether the bound delayed a
    message."""
    clock = [0.0] * len(program.ranks)
    position = [0] * len(program.ranks)
    spans: list[Span] = []
    # The order of ranks does not change the times: a rank's clock depends only on its own past and
    # on the times of its messages, which their ends determine.
    runnable = deque(range(len(program.ranks)))
    waiting: dict[Edge, int] = {}
    messages = _Messages(transfers, usual, bound, posted)
    while runnable:
        rank = runnable.popleft()
        instructions = program.ranks[rank]
        while position[rank] < len(instructions):
            instruction = instructions[position[rank]]
            start = clock[rank]
            if instruction.op is Op.RECV:
                clock[rank] = messages.receive(instruction.edge, start)
            elif instruction.op is Op.SEND:
                clock[rank] = messages.send(instruction.edge, start)
            elif instruction.group >= 0:
                end = group_end(instructions, position[rank])
                group = _group_spans(rank, instructions[position[rank] : end], start, seconds)
                spans += group
                clock[rank] = max(span.end for span in group)
                position[rank] = end
                continue
            elif instruction.op in COMPUTE:
                clock[rank] += seconds.of(instruction)
            if instruction.op in _MESSAGES:
                if clock[rank] == inf:
                    clock[rank] = start
                    waiting[instruction.edge] = rank
                    break
                if instruction.edge in waiting:  # the other end waits
                    runnable.append(waiting.pop(instruction.edge))
            if instruction.op in COMPUTE or (instruction.op in _MESSAGES and clock[rank] > start):
                spans.append(
                    Span(
                        rank, instruction.op, instruction.stage, instruction.microbatch,
                        start, clock[rank], instruction.peer,
                    )
                )
            position[rank] += 1
    for rank, instructions in enumerate(program.ranks):
        if position[rank] < len(instructions):
            stuck = f"deadlock: rank {rank} waits in {instructions[position[rank]]}"
            return Timeline((), 0), stuck, True
    return Timeline(tuple(spans), len(program.ranks)), None, messages.delayed


class _Seconds(NamedTuple):
    """Durations of compute instructions on whole devices and quotas."""

    of_op: Mapping[tuple[StageId, Op], float]
    of_microbatch: Mapping[tuple[StageId, Op, int], float]
    of_group: GroupSeconds | None

    def on_quota(self, instruction: Instruction, quotas: Mapping[str, float]) -> float:
        if self.of_group is None:
            return self.of(instruction) / instruction.quota
        return self.of_group(instruction, quotas)

    def of(self, instruction: Instruction) -> float:
        key = instruction.stage, instruction.op
        seconds = self.of_microbatch.get((*key, instruction.microbatch))
        return self.of_op.get(key, 0.0) if seconds is None else seconds


def _joined(
    program: Program, seconds: _Seconds, spans: Mapping[StageId, int]
) -> dict[tuple[StageId, Op, int], float]:
    """Return the seconds of each microbatch, with those of groups in one task per group."""
    result = dict(seconds.of_microbatch)
    groups: dict[tuple[StageId, Op, int], list[Instruction]] = defaultdict(list)
    for rank in program:
        for i in rank:
            if i.op in COMPUTE and i.stage in spans:
                groups[i.stage, i.op, i.microbatch // spans[i.stage]].append(i)
    for (stage, op, _), tasks in groups.items():
        total = sum(map(seconds.of, tasks))
        result |= {(stage, op, i.microbatch): 0.0 for i in tasks}
        result[stage, op, tasks[-1 if op is Op.BACKWARD else 0].microbatch] = total
    return result


class _Messages:
    """Messages in flight. Those of an edge are sent and received in order."""

    def __init__(
        self, transfers: Mapping[Edge, Transfer], default: Transfer, bound: int, posted: int
    ) -> None:
        self._transfers = transfers
        self._default = default
        self._bound = bound + posted - 1
        self._posts_ahead = posted > 1
        self.delayed = False
        self._arrivals: dict[Edge, deque[float]] = defaultdict(deque)
        self._freed: dict[Edge, deque[float]] = defaultdict(deque)
        self._sent: dict[Edge, int] = defaultdict(int)
        self._received: dict[Edge, int] = defaultdict(int)
        self._link_free: dict[Edge, float] = defaultdict(float)

    def send(self, edge: Edge, now: float) -> float:
        """Return when a sender that arrives now continues; infinity if that is not yet known."""
        if self._sent[edge] >= self._bound + self._posts_ahead:
            freed = self._freed[edge]
            if not freed:
                return inf
            freed_at = freed.popleft()
            self.delayed |= freed_at > now
            now = max(now, freed_at)
        self._sent[edge] += 1
        transfer = self._transfers.get(edge, self._default)
        sent = max(now, self._link_free[edge]) + transfer.seconds
        self._link_free[edge] = sent
        self._arrivals[edge].append(sent + transfer.latency)
        return now

    def receive(self, edge: Edge, now: float) -> float:
        """Return when a receiver that arrives now has the next message; infinity if it was not
        sent."""
        queue = self._arrivals[edge]
        if not queue:
            return inf
        arrival = queue.popleft()
        if not self._posts_ahead:
            self._freed[edge].append(max(now, arrival))
        elif self._received[edge]:  # the first RECV finds the receives of the start
            self._freed[edge].append(now)
        self._received[edge] += 1
        return max(now, arrival)


def _group_spans(
    rank: int, instructions: Sequence[Instruction], start: float, seconds: _Seconds
) -> list[Span]:
    """Return the spans of a group: one module runs in sequence, different modules concurrently."""
    spans = []
    ends: dict[str, float] = {}  # by module
    quotas = {instruction.stage.module: instruction.quota for instruction in instructions}
    for instruction in instructions:
        _, stage, microbatch, *_ = instruction
        begin = ends.get(stage.module, start)
        ends[stage.module] = end = begin + seconds.on_quota(instruction, quotas)
        spans.append(
            Span(rank, instruction.op, stage, microbatch, begin, end, quota=instruction.quota)
        )
    return spans
