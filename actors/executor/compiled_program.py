"""Instructions of a rank with everything resolved that does not change from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range, overlap
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS, Instruction, Op, group_end

_SENDS_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


class Producer(NamedTuple):
    """Stage whose output a task's stage reads.

    Attributes:
        name: key of the output in the inputs of the task's stage.
        output, gradient: message slots of the output and of its gradient.
        samples: samples of the microbatch in the output's slot; empty for all.
        reads: samples among them that the task's stage reads and computes gradients of.
    """

    stage: StageId
    name: str
    needs_gradient: bool
    output: int
    gradient: int
    samples: tuple[Range, ...] = ()
    reads: tuple[Range, ...] = ()


class Consumer(NamedTuple):
    """Stage that reads the output of a task's stage.

    Attributes:
        samples: samples that the consumer gets; empty for all.
        ports: ports that the message carries; None for all.
    """

    stage: StageId
    output: int
    gradient: int
    samples: tuple[Range, ...] = ()
    ports: EdgePorts | None = None


class Task(NamedTuple):
    """Instruction with its message slots and neighbours.

    Attributes:
        op, stage, microbatch, peer, group, quota: see
            :class:`~raymm.scheduler.program.program.Instruction`.
        message: slot of the message that is sent or received.
        further: slots of the same message for other stages of the rank that read it, or of their
            gradients, which are sent as one sum.
        samples: samples of the microbatch that the task covers; empty for all.
        parts: for a sum of gradients, the samples that each gradient covers.
        activations: slot of what a forward keeps for its backward.
        last: True if the stage's parameters get no more gradients in this step.
    """

    op: Op
    stage: StageId = NO_STAGE
    microbatch: int = -1
    peer: StageId = NO_STAGE
    message: int = -1
    activations: int = -1
    producers: tuple[Producer, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    last: bool = False
    group: int = -1
    quota: float = 1.0
    further: tuple[int, ...] = ()
    samples: tuple[Range, ...] = ()
    parts: tuple[tuple[Range, ...], ...] = ()

    def __str__(self) -> str:
        words = [self.op.value, str(self.stage)]
        if self.microbatch >= 0:
            words.append(f"of microbatch {self.microbatch}")
        if self.peer.module:
            words.append(f"{'to' if self.op is Op.SEND else 'from'} {self.peer}")
        return " ".join(word for word in words if word)

    @property
    def messages(self) -> list[int]:
        """Return the slots of outputs and gradients on all edges of the task."""
        ends = (*self.producers, *self.consumers)
        return [slot for end in ends for slot in (end.output, end.gradient)]


class CompiledProgram(NamedTuple):
    """Resolved instructions of a rank.

    Attributes:
        groups: tasks that run concurrently; most groups have one task, which has the whole device.
        issues: per group, receives and gradient sums that start before it.
        incoming, outgoing: per edge, the microbatches that it carries.
        reduced: stages with gradients, if the program reduces gradients at its end; None otherwise.
        bound: largest number of messages per edge in flight; None for no limit.
    """

    groups: tuple[tuple[Task, ...], ...]
    issues: tuple[tuple[Issue, ...], ...]
    incoming: dict[Edge, tuple[int, ...]]
    outgoing: dict[Edge, tuple[int, ...]]
    reduced: frozenset[StageId] | None
    bound: int | None = None
    messages: int = 0
    activations: int = 0


def compile_program(
    instructions: Sequence[Instruction], edges: Sequence[Edge], issues: Sequence[Issue] = (),
    bound: int | None = None, every: Collection[tuple[str, str]] = (),
    ports: Mapping[Edge, EdgePorts] | None = None,
) -> CompiledProgram:
    """Resolve a rank's program.

    Args:
        every: pairs (producer, consumer) of modules where the consumer reads all samples.
        ports: ports that messages carry, for edges that carry or withhold any.
    """
    instructions = [Instruction(Op(i[0]), *i[1:]) for i in instructions]
    resolver = _Resolver(instructions, edges, every, ports or {})
    tasks = [resolver.task(number, i) for number, i in enumerate(instructions)]
    carried: dict[Op, dict[Edge, tuple[int, ...]]] = {Op.RECV: {}, Op.SEND: {}}
    for i in instructions:
        if i.op in carried:
            earlier = carried[i.op].get(i.edge, ())
            carried[i.op][i.edge] = (*earlier, i.microbatch)
    groups, begins, index = [], [], 0
    ahead = deque(Issue(*issue) for issue in issues)
    while index < len(tasks):
        end = group_end(tasks, index)
        groups.append(tuple(tasks[index:end]))
        first: list[Issue] = []
        while ahead and ahead[0].before < end:
            first.append(ahead.popleft())
        begins.append(tuple(first))
        index = end
    return CompiledProgram(
        tuple(groups), tuple(begins), carried[Op.RECV], carried[Op.SEND],
        frozenset(resolver.last) if resolver.reduces else None, bound,
        len(resolver.messages), len(resolver.activations),
    )


class _Resolver:
    def __init__(
        self, instructions: Sequence[Instruction], edges: Sequence[Edge],
        every: Collection[tuple[str, str]], ports: Mapping[Edge, EdgePorts],
    ) -> None:
        self.edges, self.every, self.ports = edges, every, ports
        # An output of another rank arrives once and its gradient is returned once, even if several
        # stages read it.
        self.arrivals = {
            (i.peer, i.microbatch): i.samples for i in instructions
            if i.op is Op.RECV and i.direction is Direction.FORWARD
        }
        self.returned = {
            (i.peer, i.microbatch) for i in instructions
            if i.op is Op.SEND and i.direction is Direction.BACKWARD
        }
        self.messages_to = {
            (i.stage, i.peer, i.microbatch): i.samples for i in instructions if i.op is Op.SEND
        }
        self.forwards = {
            (i.stage, i.microbatch): i.samples for i in instructions if i.op in FORWARDS
        }
        self.backwards = {(i.stage, i.microbatch) for i in instructions if i.op in _SENDS_GRADIENTS}
        self.reduces = any(i.op is Op.REDUCE_GRADS for i in instructions)
        self.last = {
            i.stage: n for n, i in enumerate(instructions) if self.reduces and i.op in BACKWARDS
        }
        self.messages: dict[tuple[StageId, StageId, int], int] = {}
        self.activations: dict[tuple[StageId, int], int] = {}

    def task(self, number: int, i: Instruction) -> Task:
        m = i.microbatch
        task = Task(
            i.op, i.stage, m, i.peer, last=self.last.get(i.stage) == number, group=i.group,
            quota=i.quota, samples=i.samples,
        )
        if i.op in (Op.SEND, Op.RECV):
            slots, ranges = self._shared(i)
            return task._replace(message=slots[0], further=slots[1:], parts=ranges)
        if i.op not in COMPUTE:
            return task
        slot = self.activations.setdefault((i.stage, m), len(self.activations))
        producers = tuple(
            Producer(
                src, _received_name(src, i.stage),
                (src, m) in self.backwards or (src, m) in self.returned,
                self._message(src, i.stage, m), self._message(i.stage, src, m),
                self.arrivals.get((src, m), reads), reads,
            )
            for src, dst in self.edges
            if dst == i.stage and (reads := self._reads(src, dst, m)) is not None
        )
        consumers = tuple(
            Consumer(
                dst, self._message(i.stage, dst, m), self._message(dst, i.stage, m), samples,
                self.ports.get((src, dst)),
            )
            for src, dst in self.edges
            if src == i.stage and (samples := self._gets(src, dst, m)) is not None
        )
        return task._replace(activations=slot, producers=producers, consumers=consumers)

    def _reads(
        self, producer: StageId, consumer: StageId, microbatch: int
    ) -> tuple[Range, ...] | None:
        """Return the samples of an output on this rank that one of its stages reads; None for
        nothing."""
        key = producer, microbatch
        has = self.arrivals.get(key, self.forwards.get(key))
        if has is None or (consumer, microbatch) not in self.forwards:
            return None
        samples = self.forwards[consumer, microbatch]
        if not has or not samples or (producer.module, consumer.module) in self.every:
            return has
        return overlap(has, samples) or None

    def _gets(
        self, producer: StageId, consumer: StageId, microbatch: int
    ) -> tuple[Range, ...] | None:
        """Return the samples that a stage sends to another stage; None for nothing."""
        sent = self.messages_to.get((producer, consumer, microbatch))
        return self._reads(producer, consumer, microbatch) if sent is None else sent

    def _shared(self, i: Instruction) -> tuple[tuple[int, ...], tuple[tuple[Range, ...], ...]]:
        """Return the slots of a message and the samples of each part. A received output has a slot
        for each stage that reads it. A returned gradient is the sum of the gradients of these
        stages."""
        m = i.microbatch
        if (i.op is Op.RECV) is not (i.direction is Direction.FORWARD):
            return (self._message(*i.edge, m),), ()
        read = {
            dst: reads for src, dst in self.edges
            if src == i.peer and (reads := self._reads(src, dst, m)) is not None
        }
        if i.op is Op.RECV:
            return tuple(self._message(i.peer, reader, m) for reader in read), ()
        return tuple(self._message(reader, i.peer, m) for reader in read), tuple(read.values())

    def _message(self, source: StageId, target: StageId, microbatch: int) -> int:
        """Return the slot that holds a message until it is used or sent."""
        return self.messages.setdefault((source, target, microbatch), len(self.messages))


def between_modules(producer: StageId, consumer: StageId) -> bool:
    return producer.module != consumer.module


def _received_name(producer: StageId, consumer: StageId) -> str:
    """Return the key of a message: the module's name for another module, else the stage's name."""
    return producer.module if between_modules(producer, consumer) else str(producer)
