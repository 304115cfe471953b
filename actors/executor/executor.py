"""The executor: runs one rank's instructions and measures them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from raymm.actors.executor.channel import RecvChannel, SendChannel
from raymm.actors.executor.colocation import Colocation
from raymm.actors.executor.compiled_program import (
    CompiledProgram,
    Task,
    between_modules,
    compile_program,
)
from raymm.actors.executor.split_backward import DeferredWeights, backward_input
from raymm.actors.executor.step_clock import StepClock, step_clock
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.faults.whereabouts import Whereabouts
from raymm.actors.modules.draws import Draws, module_draws
from raymm.actors.modules.message import Message, MicrobatchContext, StageModule
from raymm.actors.modules.module_state import evaluating, inputs_unchanged, statistics_kept
from raymm.actors.modules.precision import ComputeCopies
from raymm.actors.optimizer.finite import FiniteObserver
from raymm.actors.optimizer.gradient_reduction import GradientReduction
from raymm.actors.quota import Work
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import COMPUTE, FORWARDS, Instruction, Op

# Tensors that a stage received and computes gradients of, by producer.
Leaves = dict[StageId, tuple[torch.Tensor, ...]]


class _Timed(NamedTuple):
    """A task that has run, between two marks of the step's clock."""

    task: Task
    start: Any
    end: Any


@dataclass
class _Step:
    """A step under way: its data, and what lives between instructions, by (stage, microbatch).

    Attributes:
        inputs, meta: as given to :meth:`Executor.run`.
        mailbox: messages by (from stage, to stage, microbatch), from when they are there until
            they are used or sent.
        saved: leaves and output of forwards that wait for their backward.
        checkpoints: received messages, by producer, of forwards that wait to be recomputed.
        deferred: parameter gradients that wait for their BACKWARD_WEIGHT.
        losses: by microbatch.
    """

    inputs: Mapping[StageId, Sequence[dict[str, Any] | None]]
    meta: StepMeta
    mailbox: dict[tuple[StageId, StageId, int], Message] = field(default_factory=dict)
    saved: dict[tuple[StageId, int], tuple[Leaves, Message]] = field(default_factory=dict)
    checkpoints: dict[tuple[StageId, int], dict[StageId, Message]] = field(default_factory=dict)
    deferred: dict[tuple[StageId, int], DeferredWeights] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def stage_inputs(self, task: Task) -> dict[str, Any] | None:
        rows = self.inputs.get(task.stage)
        return rows[task.microbatch] if rows else None

    def messages(self, task: Task) -> list[Message]:
        """What is there of what a task hands on and gets, on all its edges."""
        peers = (*task.consumers, *(src for src, *_ in task.producers))
        edges = [e for peer in peers for e in ((task.stage, peer), (peer, task.stage))]
        messages = (self.mailbox.get((*edge, task.microbatch)) for edge in edges)
        return [message for message in messages if message is not None]


class Executor:
    """Runs programs on the stages of one rank.

    Args:
        stages: the rank's stages by name.
        edges: all data edges of the plan, as (producer, consumer) stage names.
        senders, receivers: channels of the rank's remote edges, by directed edge.
        collectives: what to do for each optimizer op; gets the result to fill in.
        autocast: dtype of automatic mixed precision, None for none.
        device: where stages live.
        timeout: how long a wait on another rank may take.
        random_shares: per stage, a number by which processes that share a microbatch differ
            where they draw each their own random numbers.
        reduction: sums gradients of shared parameters, from their stage's last backward on.
        sum_gradient: makes a gradient that each of them has a part of the whole one, in place if
            it likes; for gradients that stages of other modules on the same rank are handed.
        colocation: runs the tasks of one group concurrently; None if no module has a quota.
        whereabouts: is told every instruction.
        observer: is shown what stages hand on and back, and the losses.
    """

    def __init__(
        self,
        stages: Mapping[StageId, StageModule],
        edges: Sequence[Edge],
        senders: dict[Edge, SendChannel],
        receivers: dict[Edge, RecvChannel],
        collectives: dict[Op, Callable[[StepResult], None]],
        *,
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=5),
        random_shares: Mapping[StageId, int] | None = None,
        sum_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reduction: GradientReduction | None = None,
        colocation: Colocation | None = None,
        whereabouts: Whereabouts | None = None,
        observer: FiniteObserver | None = None,
    ) -> None:
        self._stages = stages
        self._edges = tuple(edges)
        self._senders = senders
        self._receivers = receivers
        self._collectives = collectives
        self._autocast = autocast
        self._copies = ComputeCopies(stages.values(), autocast)
        self._device = device or torch.device("cpu")
        self._timeout = timeout
        self._random_shares = dict(random_shares or {})
        self._sum_gradient = sum_gradient
        self._reduction = reduction
        self._colocation = colocation
        self._whereabouts = whereabouts or Whereabouts()
        self._observer = observer or FiniteObserver(self._device)
        # Whether a stage draws random numbers; None: its first forward will tell.
        self._draws: dict[StageId, bool | None] = {
            name: stage.training and (getattr(stage, "may_draw", True) or None)
            for name, stage in stages.items()
        }

    def compile(
        self, instructions: Sequence[Instruction], issues: Sequence[Issue] = (),
        bound: int | None = None,
    ) -> CompiledProgram:
        """Resolve a program once; it can then run any number of steps.

        Args:
            instructions: of the rank.
            issues: what begins where; a receive without one begins where it is waited for, a sum
                of gradients with all others.
            bound: messages of an edge that may be under way; None for any number.
        """
        return compile_program(instructions, self._edges, issues, bound)

    def run(
        self,
        program: CompiledProgram,
        inputs: Mapping[StageId, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        """Run one step.

        Args:
            program: the compiled program.
            inputs: per stage that reads data, its inputs per microbatch.
            meta: the step's metadata.
        """
        with self._copies.shown():
            if meta.training:
                return self._run(program, inputs, meta)
            with evaluating(self._stages.values()):
                return self._run(program, inputs, meta)

    def _run(
        self,
        program: CompiledProgram,
        inputs: Mapping[StageId, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        result = StepResult()
        step = _Step(inputs, meta)
        if meta.training:
            self._observer.begin()
        if program.reduced is not None and self._reduction is not None:
            self._reduction.expect(program.reduced)
        for sender in self._senders.values():
            sender.bound = program.bound
        for edge, microbatches in program.incoming.items():
            self._receivers[edge].expect([meta.keys[m] for m in microbatches])
        clock = step_clock(self._device)
        now = clock.mark()
        timed: list[_Timed] = []
        for group, issues in zip(program.groups, program.issues, strict=True):
            self._whereabouts.enter(group[0])
            for issue in issues:
                self._begin(issue)
            if group[0].group < 0:
                (task,) = group
                self._run_alone(task, step, result)
                before, now = now, clock.mark()
                timed.append(_Timed(task, before, now))
            else:
                timed += self._run_concurrently(group, step, clock)
                now = clock.mark()
        self._whereabouts.enter("the end of a step")
        for sender in self._senders.values():
            sender.end_step(self._timeout)
        result.losses = {m: float(loss) for m, loss in step.losses.items()}
        *seconds, _ = clock.seconds([*(m for t in timed for m in (t.start, t.end)), now])
        result.spans = [
            (task.op.value, task.stage, task.microbatch, start, end, task.peer, task.quota)
            for (task, *_), start, end in zip(timed, seconds[::2], seconds[1::2], strict=True)
        ]
        return result

    def _begin(self, issue: Issue) -> None:
        if not issue.stages:
            self._receivers[issue.edge].post()
        elif self._reduction is not None:
            self._reduction.begin(issue.stages)

    def _run_alone(self, task: Task, step: _Step, result: StepResult) -> None:
        reduction = self._reduction if task.last else None
        if reduction is not None and task.op is Op.BACKWARD:
            reduction.last_backward(task.stage)
        self._run_task(task, step, result)
        if reduction is not None:
            reduction.finished(task.stage)

    def _run_concurrently(
        self, group: Sequence[Task], step: _Step, clock: StepClock
    ) -> list[_Timed]:
        """A group: every module's tasks in its thread, on its quota. What this thread issues
        afterwards (messages, sums of gradients, the optimizer's step) comes after all of it.

        Sums of gradients start here only: their hooks know one backward at a time.
        """
        of_module: dict[str, list[Task]] = {}
        for task in group:
            of_module.setdefault(task.stage.module, []).append(task)
        works = {module: self._work(tasks, step, clock) for module, tasks in of_module.items()}
        assert self._colocation is not None  # which makes groups
        outputs = self._colocation.run(works)
        timed = [task for output in outputs.values() for task in output.get()[0]]
        for task in group:
            if task.last and self._reduction is not None:
                self._reduction.finished(task.stage)
        return timed

    def _work(self, tasks: Sequence[Task], step: _Step, clock: StepClock) -> Work:
        def run(*_: Any) -> tuple[list[_Timed], list[Message]]:
            timed = []
            for task in tasks:
                start = clock.mark()
                self._run_task(task, step, StepResult())
                timed.append(_Timed(task, start, clock.mark()))
            return timed, [message for task in tasks for message in step.messages(task)]

        # Named, so that they are kept for the module's stream: what other streams have made.
        consumes = [
            (step.messages(task), step.stage_inputs(task),
             step.checkpoints.get((task.stage, task.microbatch)))
            for task in tasks
        ]  # fmt: skip
        draws = any(self._draws[task.stage] is not False for task in tasks)
        return Work(run, tuple(consumes), draws=draws)

    def _run_task(self, task: Task, step: _Step, result: StepResult) -> None:
        m = task.microbatch
        if task.op is Op.RECV:
            edge = (task.peer, task.stage)
            step.mailbox[*edge, m] = self._receivers[edge].recv()
        elif task.op is Op.SEND:
            edge = (task.stage, task.peer)
            self._senders[edge].send(step.meta.keys[m], step.mailbox.pop((*edge, m)))
        elif task.op in FORWARDS:
            self._forward(task, step)
        elif task.op is Op.RECOMPUTE:
            received = step.checkpoints.pop((task.stage, m))
            with statistics_kept(self._stages[task.stage]):
                step.saved[task.stage, m] = self._run_stage(task, step, received, True)
        elif task.op is Op.BACKWARD_WEIGHT:
            step.deferred.pop((task.stage, m)).run()
        elif task.op in COMPUTE:
            self._backward(task, step)
        else:
            self._copies.hide()
            self._collectives[task.op](result)

    def _forward(self, task: Task, step: _Step) -> None:
        m = task.microbatch
        received = {src: step.mailbox.pop((src, task.stage, m)) for src, *_ in task.producers}
        if task.op is Op.FORWARD_CHECKPOINTED:
            step.checkpoints[task.stage, m] = received
            with inputs_unchanged(task.stage, received, step.stage_inputs(task)):
                _, output = self._run_stage(task, step, received, False)
        else:
            leaves, output = self._run_stage(task, step, received, task.op is Op.FORWARD)
            if task.op is Op.FORWARD:
                step.saved[task.stage, m] = (leaves, output)
        if step.meta.training:
            self._observer.saw("output", task.stage, m, output.tensors)
        if not self._has_consumer(task.stage):
            step.losses[m] = output.tensors[0].detach()
            if step.meta.training:
                self._observer.loss(step.losses[m])
        handed = Message(tuple(t.detach() for t in output.tensors), output.side)
        for dst in task.consumers:
            step.mailbox[task.stage, dst, m] = handed

    def _run_stage(
        self, task: Task, step: _Step, received: dict[StageId, Message], with_grad: bool
    ) -> tuple[Leaves, Message]:
        """A stage's forward. Returns the leaves that its backward computes gradients of, by
        producer, and the stage's output."""
        m, meta = task.microbatch, step.meta
        stage = self._stages[task.stage]
        leaves: Leaves = {}
        named: dict[str, Message] = {}
        for src, name, needs_grad in task.producers:
            message = received[src]
            if with_grad and needs_grad:
                # A detached alias: local messages must not join two stages' graphs.
                leaves[src] = tuple(t.detach().requires_grad_() for t in message.tensors)
                message = Message(leaves[src], message.side)
            named[name] = message
        with self._drawing(task, meta) as draws:
            context = MicrobatchContext(
                label_tokens=meta.label_tokens,
                microbatch=m,
                sample_ids=meta.sample_ids[m] if meta.sample_ids else (),
                draws=draws,
            )
            with torch.set_grad_enabled(with_grad), self._precision():
                return leaves, stage.run(step.stage_inputs(task), named, context)

    @contextlib.contextmanager
    def _drawing(self, task: Task, meta: StepMeta) -> Iterator[Draws | None]:
        """What a stage draws follows from the step, its module and the microbatch. One that draws
        nothing leaves the generators alone: others may be using them."""
        drawn = self._draws[task.stage]
        if drawn is False:
            yield None
            return
        draws = module_draws(
            meta.seed, meta.step, task.stage.module, task.microbatch,
            self._random_shares.get(task.stage, 0), observed=drawn is None, batch=meta.batch,
        )  # fmt: skip
        draws.enter("stage")
        yield draws
        if drawn is None:
            draws.end()
            self._draws[task.stage] = draws.drawn

    def _backward(self, task: Task, step: _Step) -> None:
        m = task.microbatch
        leaves, output = step.saved.pop((task.stage, m))
        if self._has_consumer(task.stage):
            gradients = [step.mailbox.pop((dst, task.stage, m)).tensors for dst in task.consumers]
        else:
            gradients = []
        total: list[torch.Tensor | None] = [None] * len(output.tensors)
        for message in gradients:
            total = [g if t is None else t + g for t, g in zip(total, message, strict=True)]
        flat = [t for tensors in leaves.values() for t in tensors]
        if task.op is Op.BACKWARD_INPUT:
            received, step.deferred[task.stage, m] = backward_input(output.tensors, total, flat)
        else:
            pairs = [(t, g) for t, g in zip(output.tensors, total, strict=True) if t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            received = tuple(t.grad for t in flat)
        ready = iter(
            torch.zeros_like(t) if g is None else g for t, g in zip(flat, received, strict=True)
        )
        for src, tensors in leaves.items():
            handed = tuple(next(ready) for _ in tensors)
            local = src in self._stages and between_modules(src, task.stage)
            if self._sum_gradient is not None and local:
                # Copies: a gradient may be what pass two of a split backward starts from.
                handed = tuple(
                    self._sum_gradient(gradient.clone(memory_format=torch.contiguous_format))
                    for gradient in handed
                )
            self._observer.saw("gradient", task.stage, m, handed, of=src)
            step.mailbox[task.stage, src, m] = Message(handed, {})

    def _has_consumer(self, stage: StageId) -> bool:
        return any(src == stage for src, _ in self._edges)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)
