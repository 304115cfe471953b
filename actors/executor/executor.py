"""Executor that runs the instructions of one rank and measures them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from raymm.actors.executor.channels import RecvChannel, SendChannel
from raymm.actors.executor.colocation import Colocation
from raymm.actors.executor.compiled_program import CompiledProgram, Task, compile_program
from raymm.actors.executor.stage_actions import Action, StageActions, StageContext
from raymm.actors.executor.step_meta import StepMeta, StepResult, pack_labels
from raymm.actors.executor.step_state import StepState
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.actors.modules.message import Message, StageModule
from raymm.actors.modules.message_samples import summed_gradients
from raymm.actors.modules.module_state import evaluating
from raymm.actors.modules.precision import ComputeCopies
from raymm.actors.optimizer.finite import FiniteObserver
from raymm.actors.optimizer.gradient_reduction import GradientReduction
from raymm.actors.quota import Work
from raymm.kernels.collectives.waiting import waits_for_others
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import COMPUTE, Instruction, Op


class StepClock(Protocol):
    """Clock that marks moments of a step. The times in seconds are available after the step."""

    def mark(self) -> Any:
        """Mark this moment, in the order of the current stream's work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the marked moments on this host's wall clock. Waits until the last one has
        passed."""
        ...


class HostClock:
    """Clock for a CPU, where work is done when the call returns."""

    mark = staticmethod(time.perf_counter)
    """Mark this moment."""

    def __init__(self) -> None:
        self._wall = time.time() - time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [self._wall + mark for mark in marks]


class DeviceClock:
    """Clock for a GPU: marks are events on the current stream. The stream is idle when the clock
    starts, because the previous step waited for its last event. The first event therefore passes at
    once, at a known time."""

    def __init__(self) -> None:
        self._first = self.mark()
        self._wall = time.time()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @waits_for_others  # the device waits for messages of other processes
    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        if marks:
            marks[-1].synchronize()
        return [self._wall + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def step_clock(device: torch.device) -> StepClock:
    """Start a clock for one step on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class _Timed(NamedTuple):
    """Marks of the step's clock at the start and end of tasks."""

    starts: list[Any]
    ends: list[Any]


class _Part(NamedTuple):
    """One task or one group of concurrent tasks; ``task`` is the reported instruction."""

    task: Task
    begins: tuple[Callable[[], None], ...]
    action: Action | None
    group: dict[str, list[tuple[Task, Action]]]

    @property
    def tasks(self) -> list[Task]:
        """Return all tasks in the order in which their times are recorded."""
        if self.action is not None:
            return [self.task]
        return [task for tasks in self.group.values() for task, _ in tasks]


class Prepared(NamedTuple):
    """Program that a rank can run, with the action and the packed label of every task."""

    program: CompiledProgram
    parts: tuple[_Part, ...]
    labels: bytes


class Executor:
    """Runs programs on the stages of one rank.

    Args:
        collectives: function of each optimizer op.
        autocast: dtype of automatic mixed precision; None for none.
        sum_gradient: sums partial gradients over the processes of the rank; may work in place.
            Applied to gradients for stages of other modules on the same rank.
        agree: all-reduces bytes in host memory to their maximum over the same processes.
        colocation: runs the tasks of one group concurrently; None if no module has a quota.
        observer: checks outputs, gradients and losses for non-finite values.
        every: pairs (producer, consumer) of modules where the consumer reads all samples.
        ports: ports that messages carry, for edges that carry or withhold any.
    """

    def __init__(
        self,
        stages: Mapping[StageId, StageModule],
        edges: Sequence[Edge],
        senders: dict[Edge, SendChannel],
        receivers: dict[Edge, RecvChannel],
        collectives: dict[Op, Callable[[], None]],
        *,
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=5),
        sum_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reduction: GradientReduction | None = None,
        colocation: Colocation | None = None,
        task_tracker: TaskTracker | None = None,
        observer: FiniteObserver | None = None,
        every: Collection[tuple[str, str]] = (),
        ports: Mapping[Edge, EdgePorts] | None = None,
        spans: Mapping[StageId, int] | None = None,
    ) -> None:
        self._stages, self._ports = stages, ports
        self._edges, self._every = tuple(edges), frozenset(every)
        self._senders = senders
        self._receivers = receivers
        self._collectives = collectives
        by_module: dict[str, list[StageModule]] = {}
        for name, stage in stages.items():
            by_module.setdefault("" if colocation is None else name.module, []).append(stage)
        self._copies = {
            name: ComputeCopies(members, autocast) for name, members in by_module.items()
        }
        self._device = device or torch.device("cpu")
        self._timeout = timeout
        self._reduction = reduction
        self._colocation = colocation
        self._tracker = task_tracker or TaskTracker()
        self._observer = observer or FiniteObserver(self._device)
        around = StageContext(
            frozenset(stages), self._observer,
            None if autocast is None else partial(torch.autocast, self._device.type, autocast),
            sum_gradient, agree,
        )
        spans = spans or {}
        self._actions = {
            name: StageActions(name, stage, around, spans.get(name, 1))
            for name, stage in stages.items()
        }

    def compile(
        self, instructions: Sequence[Instruction], issues: Sequence[Issue] = (),
        bound: int | None = None,
    ) -> Prepared:
        """Resolve a program once; the result can run any number of steps.

        Args:
            issues: receives and gradient sums, with the instruction before which each starts. A
                receive without an issue starts when its message is needed, a gradient sum with all
                others.
            bound: largest number of messages per edge in flight; None for no limit.
        """
        program = compile_program(
            instructions, self._edges, issues, bound, self._every, self._ports
        )
        entries = [
            self._part(group, begins)
            for group, begins in zip(program.groups, program.issues, strict=True)
        ]
        labels = (
            (task.op.value, task.stage, task.microbatch, task.peer, task.quota)
            for entry in entries for task in entry.tasks
        )
        return Prepared(program, tuple(entries), pack_labels(list(labels)))

    def _part(self, group: Sequence[Task], issues: Sequence[Issue]) -> _Part:
        first = group[0]
        begins = tuple(begin for issue in issues if (begin := self._begin(issue)) is not None)
        if first.group < 0:
            return _Part(first, begins, self._action(first), {})
        by_module: dict[str, list[tuple[Task, Action]]] = {}
        for task in group:
            action = self._actions[task.stage].action(task)
            by_module.setdefault(task.stage.module, []).append((task, action))
        return _Part(first, begins, None, by_module)

    def _begin(self, issue: Issue) -> Callable[[], None] | None:
        if issue.stages:
            if self._reduction is None:
                return None
            return partial(self._reduction.begin, issue.stages)
        receiver = self._receivers[issue.edge]
        return receiver.post if receiver.in_order else None

    def _action(self, task: Task) -> Action:
        if task.op is Op.RECV:
            recv = self._receivers[task.peer, task.stage].recv
            if task.further:
                return partial(_receive_for, (task.message, *task.further), recv)
            return partial(_receive, task.message, recv)
        if task.op is Op.SEND:
            send = self._senders[task.stage, task.peer].send
            if task.further:
                return partial(_send_sum, task, send)
            return partial(_send, task.message, send)
        if task.op not in COMPUTE:
            return partial(self._collective, self._collectives[task.op])
        action = self._actions[task.stage].action(task)
        if task.last and self._reduction is not None:
            return partial(_last_backward, task, self._reduction, action)
        return action

    def _collective(self, run: Callable[[], None], step: StepState) -> None:
        for copies in self._copies.values():
            copies.hide()
        run()

    def run(
        self,
        prepared: Prepared,
        inputs: Mapping[StageId, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        colocation = self._colocation
        try:
            for module, copies in self._copies.items():
                copies.show(None if colocation is None else colocation.on_stream(module))
            if meta.training:
                return self._run(prepared, inputs, meta)
            with evaluating(self._stages.values()):
                return self._run(prepared, inputs, meta)
        finally:
            for copies in self._copies.values():
                copies.hide()

    def _run(
        self,
        prepared: Prepared,
        inputs: Mapping[StageId, Sequence[dict[str, Any] | None]],
        meta: StepMeta,
    ) -> StepResult:
        program, entries, labels = prepared
        step = StepState(program.messages, program.activations, inputs, meta)
        if step.learns:
            self._observer.begin()
        if program.reduced is not None and self._reduction is not None:
            self._reduction.expect(program.reduced)
        for edge, microbatches in program.outgoing.items():
            self._senders[edge].expect([meta.keys[m] for m in microbatches], program.bound)
        for edge, microbatches in program.incoming.items():
            self._receivers[edge].expect([meta.keys[m] for m in microbatches])
        enter, clock = self._tracker.enter, step_clock(self._device)
        mark = clock.mark
        timed = _Timed([], [])
        starts, ends = timed
        now = mark()
        for task, begins, action, group in entries:
            enter(task)
            for begin in begins:
                begin()
            if action is not None:
                action(step)
                starts.append(now)
                now = mark()
                ends.append(now)
            else:
                self._run_concurrently(group, step, clock, timed)
                now = mark()
        enter("the end of a step")
        for sender in self._senders.values():
            sender.end_step(self._timeout)
        times = array("d", clock.seconds([*starts, *ends, now])[:-1])
        return step.result(labels, times.tobytes())

    def _run_concurrently(
        self, group: Mapping[str, Sequence[tuple[Task, Action]]], step: StepState,
        clock: StepClock, timed: _Timed,
    ) -> None:  # fmt: skip
        """Run every module's tasks of a group in its thread, on its quota. Later work of this
        thread runs after the group, as do gradient sums: their hooks support one backward at a
        time."""
        works = {module: self._work(tasks, step, clock) for module, tasks in group.items()}
        assert self._colocation is not None  # only colocation creates groups
        quotas = {module: tasks[0][0].quota for module, tasks in group.items()}
        outputs = self._colocation.run(works, quotas)
        for module in group:
            for times, module_times in zip(timed, outputs[module].get()[0], strict=True):
                times.extend(module_times)
        for task in (task for tasks in group.values() for task, _ in tasks):
            if task.last and self._reduction is not None:
                self._reduction.finished(task.stage)

    def _work(
        self, tasks: Sequence[tuple[Task, Action]], step: StepState, clock: StepClock
    ) -> Work:
        def messages(task: Task) -> list[Message]:
            held = (step.messages[slot] for slot in task.messages)
            return [message for message in held if message is not None]

        def run(*_: Any) -> tuple[_Timed, list[Message]]:
            timed = _Timed([], [])
            for _, action in tasks:
                timed.starts.append(clock.mark())
                action(step)
                timed.ends.append(clock.mark())
            return timed, [message for task, _ in tasks for message in messages(task)]

        # Tensors from other streams are listed, so that their memory is kept for the module's
        # stream.
        consumes = [
            (messages(task), step.stage_inputs(task.stage, task.microbatch),
             step.received[task.activations])
            for task, _ in tasks
        ]  # fmt: skip
        draws = any(self._actions[task.stage].draws is not False for task, _ in tasks)
        return Work(run, tuple(consumes), draws=draws)


def _receive(place: int, recv: Callable[[], Message], step: StepState) -> None:
    step.messages[place] = recv()


def _receive_for(places: Sequence[int], recv: Callable[[], Message], step: StepState) -> None:
    message = recv()
    for slot in places:
        step.messages[slot] = message


def _send_sum(task: Task, send: Callable[[Message], None], step: StepState) -> None:
    gradients = [step.take(slot) for slot in (task.message, *task.further)]
    offsets = step.meta.offsets_of(task.microbatch, task.peer.module)
    send(summed_gradients(gradients, task.parts, task.samples, offsets))


def _send(place: int, send: Callable[[Message], None], step: StepState) -> None:
    send(step.take(place))


def _last_backward(
    task: Task, reduction: GradientReduction, action: Action, step: StepState
) -> None:
    """Run a stage's last backward of a step; the sums of its gradients may start from here on."""
    if task.op is Op.BACKWARD:
        reduction.last_backward(task.stage)
    action(step)
    reduction.finished(task.stage)
