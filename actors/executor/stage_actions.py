"""Actions of a stage's tasks, chosen when a program is compiled, so that a task runs only the code
that it needs for random numbers, sums and casts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raymm.actors.adapters.lora import without_adapters
from raymm.actors.executor.compiled_program import Task, between_modules
from raymm.actors.executor.split_backward import backward_input
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.executor.step_state import (
    GroupRun,
    Leaves,
    Received,
    StepState,
    group_of,
    joined_inputs,
)
from raymm.actors.modules.draws import module_draws
from raymm.actors.modules.message import Message, MicrobatchContext, StageModule
from raymm.actors.modules.message_samples import (
    Gradients,
    cut_message,
    gradients_of,
    joined,
    of_all_ports,
    summed,
    used_tensors,
    with_ports,
)
from raymm.actors.modules.module_state import ForwardBuffers, inputs_unchanged, statistics_kept
from raymm.actors.optimizer.finite import FiniteObserver
from raymm.errors import ModelError
from raymm.kernels.shared_draws import SharedDraws
from raymm.scheduler.graph.sample_ranges import Range, rows_of
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op

Action = Callable[[StepState], None]
"""Function that runs a task."""
Forward = Callable[[StepState, Received], tuple[Leaves, Message]]
HandBack = Callable[[StepState, list[torch.Tensor], Gradients, Leaves], None]
"""Function that returns gradients to the producers. Missing gradients are zeros in the first list
of gradients and None in the second."""


_ALL = (None, 0)  # result of :func:`_rows` for all samples


@dataclass(frozen=True)
class StageContext:
    """Objects and functions that all stages of a rank share.

    Attributes:
        precision: makes the context of a forward in mixed precision; None for none.
    """

    local: frozenset[StageId]
    observer: FiniteObserver
    precision: Callable[[], AbstractContextManager[Any]] | None = None
    sum_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None


class StageActions:
    """Makes the actions of one stage's tasks.

    Attributes:
        draws: True if the stage draws random numbers; None until its first forward has shown it.
    """

    def __init__(
        self, name: StageId, stage: StageModule, around: StageContext, span: int = 1
    ) -> None:
        self._name, self._stage, self._around, self._span = name, stage, around, span
        self._buffers = ForwardBuffers(stage)
        # By activation slot, from a checkpointed forward until its recomputation.
        self._before: dict[int, list[tuple[torch.nn.Module, str, torch.Tensor]]] = {}
        # Hooks of users may draw in frozen modules, too.
        self.draws: bool | None = getattr(stage, "hooks", None) is not None or (
            stage.training and (getattr(stage, "may_draw", True) or None)
        )

    def action(self, task: Task) -> Action:
        match task.op:
            case Op.FORWARD:
                return self._forward(task)
            case Op.FORWARD_NO_GRAD:
                return self._forward_no_grad(task)
            case Op.FORWARD_CHECKPOINTED:
                return self._forward_checkpointed(task)
            case Op.RECOMPUTE:
                return self._recompute(task)
            case Op.BACKWARD_WEIGHT:
                return partial(_run_deferred, task.activations)
            case _:
                return self._backward(task)

    def _forward(self, task: Task) -> Action:
        run, hand_on = self._run(task, with_grad=True), self._hand_on(task)
        sources, slot = [producer.output for producer in task.producers], task.activations

        def forward(step: StepState) -> None:
            step.saved[slot] = saved = run(step, [step.take(source) for source in sources])
            hand_on(step, saved[1])

        return forward

    def _forward_no_grad(self, task: Task) -> Action:
        run, hand_on = self._run(task, with_grad=False), self._hand_on(task)
        sources = [producer.output for producer in task.producers]

        def forward(step: StepState) -> None:
            hand_on(step, run(step, [step.take(source) for source in sources])[1])

        return forward

    def _forward_checkpointed(self, task: Task) -> Action:
        run, hand_on = self._run(task, with_grad=False), self._hand_on(task)
        sources, slot = [producer.output for producer in task.producers], task.activations

        def forward(step: StepState) -> None:
            step.received[slot] = received = [step.take(source) for source in sources]
            inputs = step.stage_inputs(task.stage, task.microbatch)
            with (
                inputs_unchanged(task.stage, received, inputs),
                self._buffers.recorded() as self._before[slot],
            ):
                _, output = run(step, received)
            hand_on(step, output)

        return forward

    def _recompute(self, task: Task) -> Action:
        run, slot = self._run(task, with_grad=True), task.activations

        def recompute(step: StepState) -> None:
            received, step.received[slot] = step.received[slot], None
            assert received is not None
            with self._buffers.restored(self._before.pop(slot)):
                step.saved[slot] = run(step, received)

        return recompute

    def _run(self, task: Task, with_grad: bool) -> Forward:
        """Return the stage's forward, which returns the leaves that need gradients and the
        output."""
        forward = self._run_alone(task, with_grad)
        return forward if self._span == 1 else self._run_group(task, with_grad, forward)

    def _run_group(
        self, task: Task, with_grad: bool,
        forward: Callable[[StepState, Received, dict[str, Any]], tuple[Leaves, Message]],
    ) -> Forward:
        """Return a forward that computes all microbatches of the group if it runs first."""
        stage, microbatch, span = task.stage, task.microbatch, self._span

        def grouped(step: StepState, received: Received) -> tuple[Leaves, Message]:
            rows = step.inputs[stage]
            members = group_of(rows, microbatch, span)
            key = stage, members
            if key not in step.groups:
                items = [rows[member] or {} for member in members]
                output = forward(step, received, joined_inputs(items))[1]
                split = partial(self._stage.split_items, items)
                step.groups[key] = GroupRun(output, split, with_grad)
            run = step.groups[key]
            part = run.parts[members.index(microbatch)]
            if not with_grad and run.last_use():
                del step.groups[key]
            return [], part

        return grouped

    def _run_alone(
        self, task: Task, with_grad: bool
    ) -> Callable[..., tuple[Leaves, Message]]:
        stage, microbatch, run = task.stage, task.microbatch, self._stage.run
        samples = task.samples
        names = [(p.name, with_grad and p.needs_gradient) for p in task.producers]
        around, in_parts = self._around.precision, _in_parts(task)

        def forward(
            step: StepState, received: Received, inputs: dict[str, Any] | None = None
        ) -> tuple[Leaves, Message]:
            leaves: Leaves = []
            named: dict[str, Message] = {}
            if in_parts:
                leaves, named = _received_parts(task, with_grad, step, received)
            else:
                for (name, needs_gradient), message in zip(names, received, strict=True):
                    if needs_gradient:
                        # Detached alias: local messages must not join two stages' graphs.
                        tensors = tuple([t.detach().requires_grad_() for t in message.tensors])
                        message = Message(tensors, message.side, message.names)
                        leaves.append(message)
                    named[name] = message
            meta = step.meta
            if inputs is None and (rows := step.inputs.get(stage)):
                inputs = rows[microbatch]
            ids = meta.sample_ids[microbatch] if meta.sample_ids else ()
            offsets = meta.offsets[microbatch] if meta.offsets else {}
            context = MicrobatchContext(
                meta.label_tokens, microbatch, ids, None, meta.scales, samples, offsets,
                meta.decode, meta.sample_seeds(microbatch) if meta.first_samples else None,
                meta.reference, step.learns, meta.router_counts, training=meta.training,
            )
            if self.draws is False and around is None and with_grad:
                return leaves, run(inputs, named, context)
            with ExitStack() as contexts:
                if not with_grad:
                    contexts.enter_context(torch.no_grad())
                if around is not None:
                    contexts.enter_context(around())
                if meta.reference:
                    contexts.enter_context(without_adapters(self._stage))
                if meta.counting:
                    contexts.enter_context(statistics_kept(self._stage))
                return leaves, self._drawing(step, inputs, named, context)

        return forward

    def _drawing(
        self, step: StepState, inputs: dict[str, Any] | None, named: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        """Run the stage with random numbers that depend on step, module and microbatch. A stage
        that draws nothing leaves the generators alone, because other threads may be using them."""
        drawn, meta = self.draws, step.meta
        if drawn is False:
            return self._stage.run(inputs, named, context)
        draws = module_draws(
            meta.seed, meta.step, self._name.module, context.microbatch,
            observed=drawn is None or self._span > 1, batch=meta.batch,
        )
        draws.enter("stage")
        in_parts = getattr(self._stage, "is_shared", False) or context.samples
        with SharedDraws() if in_parts else nullcontext():
            count = meta.samples_in(context.microbatch)
            output = self._stage.run(
                inputs, named, context._replace(draws=draws, sample_count=count)
            )
        grouped = self._span > 1
        if drawn is None or grouped:
            draws.end()
            if grouped and draws.drawn:
                raise ModelError(
                    f"{self._name.module!r} draws random numbers (dropout), which depend on the "
                    "microbatch; accepted: none, or microbatch_factor 1"
                )
            self.draws = drawn or draws.drawn
        return output

    def _hand_on(self, task: Task) -> Callable[[StepState, Message], None]:
        stage, microbatch = task.stage, task.microbatch
        observer, targets = self._around.observer, [c.output for c in task.consumers]
        cut_targets = [
            (c.output, c.samples, c.ports) for c in task.consumers
            if c.samples != task.samples or c.ports is not None
        ]

        def hand_on(step: StepState, output: Message) -> None:
            tensors = tuple([t.detach() for t in output.tensors])
            rows = _rows(step.meta, task, stage.module, task.samples) if task.samples else _ALL
            if step.learns:
                observer.saw("output", stage, microbatch, tensors, None, *rows)
            if output.routed is not None:
                step.routed[stage, microbatch] = output.routed
            if output.scores is not None:
                step.scores[stage, microbatch] = output.scores.detach()
            if output.loss is not None:
                step.losses[stage, microbatch] = loss = output.loss.detach()
                if output.by_source:
                    step.by_source[stage, microbatch] = output.by_source
                if step.learns:
                    observer.saw("output", stage, microbatch, (loss,), None, *rows)
                    observer.loss(loss)
            handed = Message(tensors, output.side, output.names)
            for target in targets:
                step.messages[target] = handed
            for target, samples, ports in cut_targets:
                offsets = step.meta.offsets_of(microbatch, stage.module)
                message = cut_message(handed, task.samples, samples, offsets)
                step.messages[target] = message if ports is None else with_ports(message, ports)

        return hand_on

    def _backward(self, task: Task) -> Action:
        sources, slot = [c.gradient for c in task.consumers], task.activations
        consumer_samples = [c.samples for c in task.consumers]
        uncut = all(samples == task.samples for samples in consumer_samples)
        ports = [c.ports for c in task.consumers]
        plain = all(carried is None for carried in ports)
        hand_back, in_two = self._hand_back(task), task.op is Op.BACKWARD_INPUT
        span = self._span

        def backward(step: StepState) -> None:
            (leaves, output), step.saved[slot] = step.saved[slot], None
            tensors: tuple[torch.Tensor, ...] = output.tensors
            gradients: tuple[torch.Tensor | None, ...] = (None,) * len(tensors)
            if sources:
                arrived: list[Gradients]
                if output.names:
                    arrived = [gradients_of(step.take(source)) for source in sources]
                else:
                    arrived = [step.take(source).tensors for source in sources]
                if not plain:
                    arrived = [
                        entry if carried is None else of_all_ports(entry, output, carried)
                        for entry, carried in zip(arrived, ports, strict=True)
                    ]
                if len(arrived) == 1 and uncut:
                    gradients = arrived[0]
                else:
                    offsets = step.meta.offsets_of(task.microbatch, task.stage.module)
                    gradients = summed(arrived, consumer_samples, task.samples, offsets)
                if output.names:  # some may be unused by later stages
                    pairs = zip(tensors, gradients, strict=True)
                    pairs = [(t, g) for t, g in pairs if g is not None]
                    tensors, gradients = tuple(t for t, _ in pairs), tuple(g for _, g in pairs)
            if output.loss is not None:
                tensors, gradients = (*tensors, output.loss), (*gradients, None)
            flat = [leaf for entry in leaves for leaf in entry.tensors]
            if in_two:
                received, step.deferred[slot] = backward_input(tensors, gradients, flat)
            else:
                _accumulate(tensors, gradients)
                received = tuple([leaf.grad for leaf in flat])
                if span > 1:
                    members = group_of(step.inputs[task.stage], task.microbatch, span)
                    run = step.groups[task.stage, members]
                    if run.last_use():
                        del step.groups[task.stage, members]
                        _accumulate(*run.gradients())
            hand_back(step, [
                torch.zeros_like(leaf) if gradient is None
                # A view of a larger gradient (of merged inputs) would keep all of it alive.
                else gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes
                else gradient
                for leaf, gradient in zip(flat, received, strict=True)
            ], received, leaves)

        return backward

    def _hand_back(self, task: Task) -> HandBack:
        observer, sum_gradient = self._around.observer, self._around.sum_gradient
        local, agree = self._around.local, self._around.agree
        producers = [
            (p, p.gradient, p.stage not in local,
             sum_gradient if p.stage in local and between_modules(p.stage, task.stage) else None)
            for p in task.producers if p.needs_gradient
        ]

        def hand_back(
            step: StepState, gradients: list[torch.Tensor], received: Gradients, leaves: Leaves
        ) -> None:
            start = 0
            for (producer, target, sent, sum_up), message in zip(producers, leaves, strict=True):
                end = start + len(message.tensors)
                handed = tuple(gradients[start:end])
                side = used_tensors(received[start:end], sent, agree) if message.names else {}
                start = end
                if sum_up is not None:
                    # Summed in copies, because pass two of a split backward may start from the
                    # original.
                    handed = tuple(
                        sum_up(gradient.clone(memory_format=torch.contiguous_format))
                        for gradient in handed
                    )
                module, reads = producer.stage.module, producer.reads
                rows = _rows(step.meta, task, module, reads) if reads else _ALL
                observer.saw("gradient", task.stage, task.microbatch, handed, producer.stage, *rows)
                step.messages[target] = Message(handed, side)

        return hand_back


def _rows(
    meta: StepMeta, task: Task, module: str, samples: tuple[Range, ...]
) -> tuple[tuple[int, int], int]:
    """Return the range of rows of some samples in a module's microbatch, and the number of all
    rows."""
    offsets = meta.offsets_of(task.microbatch, module)
    rows = rows_of(Range(samples[0].lo, samples[-1].hi), offsets)
    if offsets is not None:
        return (rows.lo, rows.hi), offsets[-1]
    return (rows.lo, rows.hi), len(meta.sample_ids[task.microbatch]) if meta.sample_ids else 0


def _in_parts(task: Task) -> bool:
    """Return True if several replicas made the samples that the stage reads, or one made more than
    these."""
    names = [p.name for p in task.producers]
    return len(set(names)) < len(names) or any(p.reads != p.samples for p in task.producers)


def _received_parts(
    task: Task, with_grad: bool, step: StepState, messages: Received
) -> tuple[Leaves, dict[str, Message]]:
    """Return the leaves that need gradients, and the joined message of each producer module."""
    leaves: Leaves = []
    by_module: dict[str, list[tuple[tuple[Range, ...], Message]]] = {}
    for producer, message in zip(task.producers, messages, strict=True):
        offsets = step.meta.offsets_of(task.microbatch, producer.stage.module)
        message = cut_message(message, producer.samples, producer.reads, offsets)
        if with_grad and producer.needs_gradient:
            tensors = tuple([t.detach().requires_grad_() for t in message.tensors])
            message = message._replace(tensors=tensors)
            leaves.append(message)
        by_module.setdefault(producer.name, []).append((producer.reads, message))
    return leaves, {
        name: joined(name, [message for _, message in sorted(module_messages, key=_first)])
        for name, module_messages in by_module.items()
    }


def _first(part: tuple[tuple[Range, ...], Message]) -> Range:
    return part[0][0]


def _accumulate(
    tensors: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]
) -> None:
    """Accumulate gradients of leaves and parameters, from the outputs that require grad."""
    if tensors and all([t.requires_grad for t in tensors]):
        torch.autograd.backward(tensors, gradients)
        return
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _run_deferred(place: int, step: StepState) -> None:
    deferred, step.deferred[place] = step.deferred[place], None
    assert deferred is not None
    deferred.run()
