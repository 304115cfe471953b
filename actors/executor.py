"""The executor: runs one rank's instructions and measures them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from raymm.actors.channel import RecvChannel, SendChannel
from raymm.actors.stages.message import Message, MicrobatchContext
from raymm.actors.stages.source import derive_seed
from raymm.scheduler.program import COMPUTE, Instruction, Op


class StageModule(Protocol):
    """What the executor needs of a stage: an ``nn.Module`` with ``run``.

    ``run(inputs, received, context)`` returns a :class:`Message`; the sink stage's first
    tensor is the loss. ``received`` maps producers (stage names, or module names where the
    producer is another module) to messages.
    """

    training: bool

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message: ...


class StepMeta(NamedTuple):
    """What every rank is told about a step.

    Attributes:
        step: number of the step, for seeds.
        label_tokens: label tokens in the whole step.
        keys: per microbatch, a value that determines every message's layout.
        seed: the run's seed.
        sample_ids: per microbatch, its samples' ids.
        training: False for evaluation: no dropout anywhere.
    """

    step: int
    label_tokens: int
    keys: tuple[object, ...]
    seed: int = 0
    sample_ids: tuple[tuple[str, ...], ...] = ()
    training: bool = True


@dataclass
class StepResult:
    """One rank's outcome of a step. ``losses`` maps microbatches to their share of the loss
    (on the sink's rank). Span times are seconds on this host's wall clock."""

    losses: dict[int, float] = field(default_factory=dict)
    spans: list[tuple[str, str, int, float, float, str]] = field(default_factory=list)
    grad_norm: float | None = None
    learning_rate: float | None = None


class _Task(NamedTuple):
    """An instruction with everything resolved that does not change from step to step."""

    op: Op
    stage: str
    microbatch: int
    peer: str
    producers: tuple[tuple[str, str, bool], ...] = ()  # (stage, name in received, needs grad)
    consumers: tuple[str, ...] = ()  # who gets what this produces


class CompiledProgram(NamedTuple):
    """A rank's instructions, resolved; and per incoming edge the microbatches it carries."""

    tasks: tuple[_Task, ...]
    incoming: dict[tuple[str, str], tuple[int, ...]]


class Executor:
    """Runs programs on the stages of one rank.

    Args:
        stages: the rank's stages by name.
        edges: all data edges of the plan, as (producer, consumer) stage names.
        senders, receivers: channels of the rank's remote edges, by directed edge.
        collectives: what to do for each epilogue op; gets the result to fill in.
        autocast: dtype of automatic mixed precision, None for none.
        device: where stages live.
        timeout: how long a wait on another rank may take.
    """

    def __init__(
        self,
        stages: dict[str, StageModule],
        edges: Sequence[tuple[str, str]],
        senders: dict[tuple[str, str], SendChannel],
        receivers: dict[tuple[str, str], RecvChannel],
        collectives: dict[Op, Callable[[StepResult], None]],
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        self._stages = stages
        self._edges = tuple(edges)
        self._senders = senders
        self._receivers = receivers
        self._collectives = collectives
        self._autocast = autocast
        self._device = device or torch.device("cpu")
        self._timeout = timeout

    def compile(self, instructions: Sequence[Instruction]) -> CompiledProgram:
        """Resolve a program once; it can then run any number of steps."""
        instructions = [Instruction(Op(i[0]), *i[1:]) for i in instructions]
        computes = {(i.op, i.stage, i.microbatch) for i in instructions if i.op in COMPUTE}
        sends = {(i.stage, i.peer, i.microbatch) for i in instructions if i.op is Op.SEND}
        recvs = {(i.peer, i.stage, i.microbatch) for i in instructions if i.op is Op.RECV}
        forwards = {(s, m) for op, s, m in computes if op is not Op.BACKWARD}
        backwards = {(s, m) for op, s, m in computes if op is Op.BACKWARD}
        tasks = []
        incoming: dict[tuple[str, str], tuple[int, ...]] = {}
        for i in instructions:
            producers: tuple[tuple[str, str, bool], ...] = ()
            consumers: tuple[str, ...] = ()
            if i.op is Op.RECV:
                incoming[i.edge] = incoming.get(i.edge, ()) + (i.microbatch,)
            elif i.op in COMPUTE:
                m = i.microbatch
                before = [
                    src
                    for src, dst in self._edges
                    if dst == i.stage and ((src, dst, m) in recvs or (src, m) in forwards)
                ]
                producers = tuple(
                    (src, _received_name(src, i.stage),
                     (src, m) in backwards or (i.stage, src, m) in sends)
                    for src in before
                )
                after = [
                    dst
                    for src, dst in self._edges
                    if src == i.stage and ((src, dst, m) in sends or (dst, m) in forwards)
                ]
                consumers = tuple(after)
            tasks.append(_Task(i.op, i.stage, i.microbatch, i.peer, producers, consumers))
        return CompiledProgram(tuple(tasks), incoming)

    def run(
        self,
        program: CompiledProgram,
        inputs: dict[str, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        """Run one step.

        Args:
            program: the compiled program.
            inputs: per stage that reads data, its inputs per microbatch.
            meta: the step's metadata.
        """
        with contextlib.nullcontext() if meta.training else _evaluating(self._stages.values()):
            return self._run(program, inputs, meta)

    def _run(
        self,
        program: CompiledProgram,
        inputs: dict[str, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        result = StepResult()
        mailbox: dict[tuple[str, str, int], Message] = {}
        saved: dict[tuple[str, int], tuple[dict[str, tuple[torch.Tensor, ...]], Message]] = {}
        losses: dict[int, torch.Tensor] = {}
        for edge, microbatches in program.incoming.items():
            self._receivers[edge].expect([meta.keys[m] for m in microbatches])
        wall = time.time() - time.perf_counter()
        for task in program.tasks:
            start = time.perf_counter()
            m = task.microbatch
            if task.op is Op.RECV:
                edge = (task.peer, task.stage)
                mailbox[*edge, m] = self._receivers[edge].recv()
            elif task.op is Op.SEND:
                edge = (task.stage, task.peer)
                self._senders[edge].send(meta.keys[m], mailbox.pop((*edge, m)))
            elif task.op is Op.BACKWARD:
                self._backward(task, mailbox, saved)
            elif task.op in COMPUTE:
                self._forward(task, inputs, meta, mailbox, saved, losses)
            else:
                self._collectives[task.op](result)
            end = time.perf_counter()
            result.spans.append(
                (task.op.value, task.stage, m, wall + start, wall + end, task.peer)
            )
        for sender in self._senders.values():
            sender.end_step(self._timeout)
        result.losses = {m: float(loss) for m, loss in losses.items()}
        return result

    def _forward(
        self,
        task: _Task,
        inputs: dict[str, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
        mailbox: dict[tuple[str, str, int], Message],
        saved: dict[tuple[str, int], tuple[dict[str, tuple[torch.Tensor, ...]], Message]],
        losses: dict[int, torch.Tensor],
    ) -> None:
        m = task.microbatch
        with_grad = task.op is Op.FORWARD
        stage = self._stages[task.stage]
        leaves: dict[str, tuple[torch.Tensor, ...]] = {}
        received: dict[str, Message] = {}
        for src, name, needs_grad in task.producers:
            message = mailbox.pop((src, task.stage, m))
            if with_grad and needs_grad:
                # A detached alias: local messages must not join two stages' graphs.
                leaves[src] = tuple(t.detach().requires_grad_() for t in message.tensors)
                message = Message(leaves[src], message.side)
            received[name] = message
        stage_inputs = inputs.get(task.stage)
        context = MicrobatchContext(
            label_tokens=meta.label_tokens,
            microbatch=m,
            sample_ids=meta.sample_ids[m] if meta.sample_ids else (),
        )
        if stage.training:
            torch.manual_seed(derive_seed(meta.seed, meta.step, task.stage, m))
        with torch.set_grad_enabled(with_grad), self._precision():
            output = stage.run(stage_inputs[m] if stage_inputs else None, received, context)
        if not self._has_consumer(task.stage):
            losses[m] = output.tensors[0].detach()
        handed = Message(tuple(t.detach() for t in output.tensors), output.side)
        for dst in task.consumers:
            mailbox[task.stage, dst, m] = handed
        if with_grad:
            saved[task.stage, m] = (leaves, output)

    def _backward(
        self,
        task: _Task,
        mailbox: dict[tuple[str, str, int], Message],
        saved: dict[tuple[str, int], tuple[dict[str, tuple[torch.Tensor, ...]], Message]],
    ) -> None:
        m = task.microbatch
        leaves, output = saved.pop((task.stage, m))
        if self._has_consumer(task.stage):
            gradients = [mailbox.pop((dst, task.stage, m)).tensors for dst in task.consumers]
        else:
            gradients = []
        total: list[torch.Tensor | None] = [None] * len(output.tensors)
        for one in gradients:
            total = [g if t is None else t + g for t, g in zip(total, one, strict=True)]
        pairs = [(t, g) for t, g in zip(output.tensors, total, strict=True) if t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for src, tensors in leaves.items():
            grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in tensors)
            mailbox[task.stage, src, m] = Message(grads, {})

    def _has_consumer(self, stage: str) -> bool:
        return any(src == stage for src, _ in self._edges)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


@contextlib.contextmanager
def _evaluating(stages: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Every module in eval mode; afterwards those that were in train mode are again."""
    switched = [module for stage in stages for module in stage.modules() if module.training]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True


def _received_name(producer: str, consumer: str) -> str:
    """Messages from another module are known by the module's name."""
    module = producer.rpartition(".")[0]
    return producer if module == consumer.rpartition(".")[0] else module
