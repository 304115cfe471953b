"""Claim: the executor's own work per instruction stays within fixed call counts.

Run with `python -m benchmarks.instruction_calls --json`.

Counts calls of Python functions and of C functions between one instruction and the next, on one
rank of a chain with messages in both directions over links that do nothing. Calls of the stage and
of autograd are excluded. A test checks the counts
(`tests/actors/executor/test_stage_actions.py`), so that no step gets slower unnoticed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from rich.table import Table

from benchmarks.shared.common import console, emit, machine, parser
from raymm.actors.executor.channels import Link, RecvChannel, SendChannel
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.layouts import Layout
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import lower

MICROBATCHES, SHAPE, STEPS = 8, (4, 8), 20
CPU = torch.device("cpu")


class Scale(torch.nn.Module):
    """Stage without random numbers: one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.eval()

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        (message,) = received.values()
        return Message((message.tensors[0] * self.weight,), {})


class _Done:
    def wait(self, timeout: timedelta | None = None) -> None: ...


class IdleLink(Link):
    """Link over which every message has already arrived."""

    def __init__(self) -> None:
        self.peer = 0
        self.isend = self.irecv = self.isend_to_host = self.irecv_on_host = self._at_once

    def _at_once(self, tensor: torch.Tensor) -> Any:
        return _Done()


class _Described(RecvChannel):
    """Receive channel whose layouts are known without a message."""

    def _recv_layout(self) -> Layout:
        return Layout(((SHAPE, torch.float32),))


class CallCounter(TaskTracker):
    """Task tracker that counts calls per operation between enter and exit."""

    def __init__(self) -> None:
        super().__init__()
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self._op = ""

    def enter(self, instruction: Any) -> None:
        self._op = instruction if isinstance(instruction, str) else instruction.op.value
        self.entered[self._op] += 1

    def event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one event of ``sys.setprofile``, except calls from torch's Python code and the
        stage.
        """
        file = frame.f_code.co_filename
        ours = "/actors/" in file or "/kernels/" in file
        if ours and event == "call":
            self.python[self._op] += 1
        elif ours and event == "c_call":
            self.c[self._op] += 1


def middle_rank() -> tuple[Executor, Any, CallCounter]:
    """Return the executor, program and counter of a rank between two others."""
    graph = ModuleGraph((ModuleNode("chain", (True,) * 3),), ())
    plan = Plan(graph, tuple(Stage("chain", i, (i, i + 1), i) for i in range(3)), MICROBATCHES)
    program = lower(plan, [()] * MICROBATCHES)
    proof = check_program(program)
    name, counter = plan.stages[1].id, CallCounter()
    edges = [edge for src, dst in plan.stage_edges for edge in ((src, dst), (dst, src))]
    senders = {edge: SendChannel({0: IdleLink()}, CPU) for edge in edges if edge[0] == name}
    receivers: dict[Any, RecvChannel] = {
        edge: _Described({0: IdleLink()}, CPU, timedelta(seconds=9))
        for edge in edges if edge[1] == name
    }
    stage: Any = Scale()
    executor = Executor(
        {name: stage}, plan.stage_edges, senders, receivers, {}, task_tracker=counter
    )
    prepared = executor.compile(program.ranks[1], proof.issues[1], proof.bound)
    return executor, prepared, counter


def calls() -> dict[str, dict[str, float]]:
    """Return calls of raymm's Python functions, and their calls of C functions, per instruction."""
    executor, prepared, counter = middle_rank()
    meta = StepMeta(0, 1, ("shape",) * MICROBATCHES)
    for _ in range(2):  # the first step determines layouts
        executor.run(prepared, {}, meta)
    for counts in (counter.python, counter.c, counter.entered):
        counts.clear()
    sys.setprofile(counter.event)
    try:
        for _ in range(STEPS):
            executor.run(prepared, {}, meta)
    finally:
        sys.setprofile(None)
    return {
        op: {"python": counter.python[op] / number, "c": counter.c[op] / number}
        for op, number in counter.entered.items()
    }


def microseconds() -> float:
    """Return microseconds of this thread per instruction, including autograd and the stage.

    The minimum of several rounds, because of other load on the machine.
    """
    executor, prepared, _ = middle_rank()
    meta = StepMeta(0, 1, ("shape",) * MICROBATCHES)
    turns = []
    for _ in range(10):
        start = time.thread_time()
        for _ in range(STEPS):
            executor.run(prepared, {}, meta)
        turns.append((time.thread_time() - start) / STEPS)
    return min(turns[1:]) / len(prepared.parts) * 1e6


def main() -> int:
    """Count, print the table, then the result line."""
    options = parser("What each instruction costs the executor.").parse_args()
    torch.set_num_threads(1)
    counted = calls()
    table = Table(title="calls per instruction")
    for heading in ("instruction", "Python", "C"):
        table.add_column(heading, justify="left" if heading == "instruction" else "right")
    for op, numbers in counted.items():
        table.add_row(op, f"{numbers['python']:.1f}", f"{numbers['c']:.1f}")
    result = {
        "benchmark": "instruction_calls",
        "calls": {op: {k: round(v, 2) for k, v in n.items()} for op, n in counted.items()},
        "mean_python_calls": round(statistics.mean(n["python"] for n in counted.values()), 2),
        "microseconds_per_instruction": round(microseconds(), 1),
        "machine": machine(),
    }
    console().print(table)
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
