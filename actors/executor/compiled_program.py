"""A rank's instructions with everything resolved that does not change from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS, Instruction, Op, group_end

_SENDS_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


class Task(NamedTuple):
    """An instruction, and whom it has to do with."""

    op: Op
    stage: StageId
    microbatch: int
    peer: StageId
    producers: tuple[tuple[StageId, str, bool], ...] = ()  # (stage, name in received, needs grad)
    consumers: tuple[StageId, ...] = ()  # who gets what this produces
    last: bool = False  # the stage's parameters get no more gradients in this step
    group: int = -1
    quota: float = 1.0

    def __str__(self) -> str:
        words = [self.op.value, str(self.stage)]
        if self.microbatch >= 0:
            words.append(f"of microbatch {self.microbatch}")
        if self.peer.module:
            words.append(f"{'to' if self.op is Op.SEND else 'from'} {self.peer}")
        return " ".join(word for word in words if word)


class CompiledProgram(NamedTuple):
    """A rank's instructions, resolved, in groups (most are of one task, which has the device to
    itself); per group what begins before it; per incoming edge the microbatches it carries; if
    gradients are reduced at its end, the stages that have any; and how many messages of an edge
    may be under way."""

    groups: tuple[tuple[Task, ...], ...]
    issues: tuple[tuple[Issue, ...], ...]
    incoming: dict[Edge, tuple[int, ...]]
    reduced: frozenset[StageId] | None
    bound: int | None = None


def compile_program(
    instructions: Sequence[Instruction], edges: Sequence[Edge], issues: Sequence[Issue] = (),
    bound: int | None = None,
) -> CompiledProgram:
    """Resolve a rank's program.

    Args:
        instructions: of the rank.
        edges: all data edges of the plan, as (producer, consumer) stage names.
        issues: what begins where, as
            :func:`~raymm.scheduler.program.check_program.check_program` says.
        bound: messages of an edge that may be under way, as it says, too.
    """
    instructions = [Instruction(Op(i[0]), *i[1:]) for i in instructions]
    sends = {(i.stage, i.peer, i.microbatch) for i in instructions if i.op is Op.SEND}
    recvs = {(i.peer, i.stage, i.microbatch) for i in instructions if i.op is Op.RECV}
    forwards = {(i.stage, i.microbatch) for i in instructions if i.op in FORWARDS}
    backwards = {(i.stage, i.microbatch) for i in instructions if i.op in _SENDS_GRADIENTS}
    reduces = any(i.op is Op.REDUCE_GRADS for i in instructions)
    last = {i.stage: n for n, i in enumerate(instructions) if reduces and i.op in BACKWARDS}
    tasks = []
    incoming: dict[Edge, tuple[int, ...]] = {}
    for number, i in enumerate(instructions):
        producers: tuple[tuple[StageId, str, bool], ...] = ()
        consumers: tuple[StageId, ...] = ()
        if i.op is Op.RECV:
            incoming[i.edge] = incoming.get(i.edge, ()) + (i.microbatch,)
        elif i.op in COMPUTE:
            m = i.microbatch
            sources = [
                src
                for src, dst in edges
                if dst == i.stage and ((src, dst, m) in recvs or (src, m) in forwards)
            ]
            producers = tuple(
                (src, _received_name(src, i.stage),
                 (src, m) in backwards or (i.stage, src, m) in sends)
                for src in sources
            )
            after = [
                dst
                for src, dst in edges
                if src == i.stage and ((src, dst, m) in sends or (dst, m) in forwards)
            ]
            consumers = tuple(after)
        is_last = last.get(i.stage) == number
        tasks.append(
            Task(
                i.op, i.stage, i.microbatch, i.peer, producers, consumers, is_last, i.group,
                i.quota,
            )
        )
    groups, begins, index = [], [], 0
    ahead = deque(Issue(*issue) for issue in issues)
    while index < len(tasks):
        after = group_end(tasks, index)
        groups.append(tuple(tasks[index:after]))
        before: list[Issue] = []
        while ahead and ahead[0].before < after:
            before.append(ahead.popleft())
        begins.append(tuple(before))
        index = after
    return CompiledProgram(
        tuple(groups), tuple(begins), incoming, frozenset(last) if reduces else None, bound
    )


def between_modules(producer: StageId, consumer: StageId) -> bool:
    """Whether two stages are of different modules."""
    return producer.module != consumer.module


def _received_name(producer: StageId, consumer: StageId) -> str:
    """Messages from another module are known by the module's name."""
    return producer.module if between_modules(producer, consumer) else str(producer)
