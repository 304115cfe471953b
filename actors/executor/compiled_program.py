"""A rank's instructions with everything resolved that does not change from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range, overlap
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS, Instruction, Op, group_end

_SENDS_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


class Producer(NamedTuple):
    """A stage that a task's stage gets something of.

    Attributes:
        stage: which.
        name: by which the task's stage knows it.
        needs_gradient: whether it gets one back.
        output, gradient: where its output lies, and where the gradient of it goes.
        samples: that the output lies there of; without any, of all.
        reads: those of them that the task's stage reads, and makes the gradient of.
    """

    stage: StageId
    name: str
    needs_gradient: bool
    output: int
    gradient: int
    samples: tuple[Range, ...] = ()
    reads: tuple[Range, ...] = ()


class Consumer(NamedTuple):
    """A stage that gets what a task's stage produces: where its copy lies, and the gradient, of
    which samples (without any, of all), and what of ports (None: what there is)."""

    stage: StageId
    output: int
    gradient: int
    samples: tuple[Range, ...] = ()
    ports: EdgePorts | None = None


class Task(NamedTuple):
    """An instruction, and whom it has to do with.

    Attributes:
        op, stage, microbatch, peer, group, quota: as of
            :class:`~raymm.scheduler.program.program.Instruction`.
        message: where what is sent or received lies.
        further: where the same lies for other stages of the rank that read it too; or their
            gradients of it, which are sent as one sum.
        samples: of the microbatch that it is of; without any, of all.
        parts: the samples that each gradient of such a sum is of.
        activations: where lies what a forward keeps for its backward.
        producers, consumers: of a computing task.
        last: the stage's parameters get no more gradients in this step.
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
        """Where what it hands on and gets lies, on all its edges."""
        ends = (*self.producers, *self.consumers)
        return [place for end in ends for place in (end.output, end.gradient)]


class CompiledProgram(NamedTuple):
    """A rank's instructions, resolved.

    Attributes:
        groups: tasks; most groups are of one task, which has the device to itself.
        issues: per group, what begins before it.
        incoming, outgoing: per edge, the microbatches it carries.
        reduced: if gradients are reduced at its end, the stages that have any.
        bound: how many messages of an edge may be under way.
        messages, activations: how many places there are for either.
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
        instructions: of the rank.
        edges: all data edges of the plan, as (producer, consumer) stage names.
        issues: what begins where, as
            :func:`~raymm.scheduler.program.check_program.check_program` says.
        bound: messages of an edge that may be under way, as it says, too.
        every: (producer, consumer) modules of which the second reads all samples.
        ports: what messages have of them, of edges that carry or withhold any.
    """
    instructions = [Instruction(Op(i[0]), *i[1:]) for i in instructions]
    resolver = _Resolver(instructions, edges, every, ports or {})
    tasks = [resolver.task(number, i) for number, i in enumerate(instructions)]
    carried: dict[Op, dict[Edge, tuple[int, ...]]] = {Op.RECV: {}, Op.SEND: {}}
    for i in instructions:
        if i.op in carried:
            before = carried[i.op].get(i.edge, ())
            carried[i.op][i.edge] = (*before, i.microbatch)
    groups, begins, index = [], [], 0
    ahead = deque(Issue(*issue) for issue in issues)
    while index < len(tasks):
        after = group_end(tasks, index)
        groups.append(tuple(tasks[index:after]))
        first: list[Issue] = []
        while ahead and ahead[0].before < after:
            first.append(ahead.popleft())
        begins.append(tuple(first))
        index = after
    return CompiledProgram(
        tuple(groups), tuple(begins), carried[Op.RECV], carried[Op.SEND],
        frozenset(resolver.last) if resolver.reduces else None, bound,
        len(resolver.messages), len(resolver.activations),
    )


class _Resolver:
    """Makes tasks of a rank's instructions."""

    def __init__(
        self, instructions: Sequence[Instruction], edges: Sequence[Edge],
        every: Collection[tuple[str, str]], ports: Mapping[Edge, EdgePorts],
    ) -> None:
        self.edges, self.every, self.ports = edges, every, ports
        # What other ranks make arrives once, and its gradient goes back once, however many stages
        # read it.
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
        self.backwards = {
            (i.stage, i.microbatch) for i in instructions if i.op in _SENDS_GRADIENTS
        }
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
            places, parts = self._shared(i)
            return task._replace(message=places[0], further=places[1:], parts=parts)
        if i.op not in COMPUTE:
            return task
        place = self.activations.setdefault((i.stage, m), len(self.activations))
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
        return task._replace(activations=place, producers=producers, consumers=consumers)

    def _reads(
        self, producer: StageId, consumer: StageId, microbatch: int
    ) -> tuple[Range, ...] | None:
        """The samples of what is on the rank that a stage of the rank reads; None if it reads
        nothing."""
        place = producer, microbatch
        has = self.arrivals.get(place, self.forwards.get(place))
        if has is None or (consumer, microbatch) not in self.forwards:
            return None
        own = self.forwards[consumer, microbatch]
        if not has or not own or (producer.module, consumer.module) in self.every:
            return has
        return overlap(has, own) or None

    def _gets(
        self, producer: StageId, consumer: StageId, microbatch: int
    ) -> tuple[Range, ...] | None:
        """The samples that a stage of the rank hands to another, or to another rank; None if
        nothing."""
        sent = self.messages_to.get((producer, consumer, microbatch))
        return self._reads(producer, consumer, microbatch) if sent is None else sent

    def _shared(
        self, i: Instruction
    ) -> tuple[tuple[int, ...], tuple[tuple[Range, ...], ...]]:
        """Where what a message has lies: of outputs that arrive, for each stage that reads them;
        of a gradient that goes back, what each of them has made, and of which samples."""
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
        """Where a message lies, from when it is there until it is used or sent."""
        return self.messages.setdefault((source, target, microbatch), len(self.messages))


def between_modules(producer: StageId, consumer: StageId) -> bool:
    """Whether two stages are of different modules."""
    return producer.module != consumer.module


def _received_name(producer: StageId, consumer: StageId) -> str:
    """Messages from another module are known by the module's name."""
    return producer.module if between_modules(producer, consumer) else str(producer)
