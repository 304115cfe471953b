"""Ranks issue communication in the proven order: in threads, over blocking operations.

Every message and sum blocks its process until all participants have arrived.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.executor.channels import RecvChannel, SendChannel
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.message import Message
from raymm.actors.optimizer.gradient_reduction import (
    GradientReduction,
    ParameterReference,
    SharedParameter,
)
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.issue_order import Issue, shared_gradients
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedules.registry import SCHEDULES

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=60)
WIDTH, MICROBATCHES, STEPS = 4, 8, 2


class Meetings:
    """Operations that block until all participants have arrived."""

    def __init__(self, patience: float) -> None:
        self._changed = threading.Condition()
        self._came: dict[Hashable, dict[Hashable, torch.Tensor]] = defaultdict(dict)
        self._patience = patience

    def meet(self, name: Hashable, who: Hashable, members: int, value: torch.Tensor) -> list:
        """Return the values of all participants.

        Raises:
            RuntimeError: a participant did not arrive.
        """
        with self._changed:
            came = self._came[name]
            came[who] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(came) >= members, self._patience):
                raise RuntimeError(f"no peer came to {name}")
            return [came[member] for member in sorted(came, key=str)]


class Done:
    """Result of a completed operation."""

    def wait(self, timeout: timedelta = PATIENCE, /) -> None:
        """Return immediately."""


class BlockingLink:
    """Connection of an ordered pair of processes; all edges between them share its order."""

    def __init__(self, meetings: Meetings, pair: tuple[int, int], counts: dict) -> None:
        self.meetings, self.pair, self.counts, self.peer = meetings, pair, counts, pair[1]

    def _meet(self, kind: str, who: str, tensor: torch.Tensor, members: int) -> list:
        number = self.counts[kind, self.pair, who]
        self.counts[kind, self.pair, who] += 1
        return self.meetings.meet((kind, self.pair, number), who, members, tensor)

    def isend(self, tensor: torch.Tensor) -> Done:
        self._meet("message", "to", tensor.clone(), 2)
        return Done()

    def irecv(self, tensor: torch.Tensor) -> Done:
        _, sent = self._meet("message", "from", tensor, 2)
        assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
        tensor.copy_(sent)
        return Done()

    def isend_to_host(self, tensor: torch.Tensor) -> Done:
        self._meet("host", "to", tensor.clone(), 1)  # hosts do not wait for each other
        return Done()

    def irecv_on_host(self, tensor: torch.Tensor) -> Done:
        _, sent = self._meet("host", "from", tensor, 2)
        tensor.copy_(sent)
        return Done()


class Part(nn.Module):
    """Linear layer over the sum of its inputs.

    Both ends of the language model have the same embedding.
    """

    def __init__(self, stage: StageId, tied: bool, sink: bool) -> None:
        super().__init__()
        torch.manual_seed(stage.index + len(stage.module))
        self.linear = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.embedding = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.tied, self.sink = tied, sink

    def run(self, inputs, received, context) -> Message:
        values = [message.tensors[0] for message in received.values()]
        values.append(torch.full((3, WIDTH), 0.1 * (context.microbatch + 1)))
        hidden = self.linear(sum(values))
        if self.tied:
            hidden = hidden * self.embedding
        if self.sink:
            return Message((), {}, loss=hidden.tanh().square().sum())
        return Message((hidden.tanh(),), {})


def tied_plan(schedule: str) -> Plan:
    """Return a plan with an encoder and two replicas of a three-stage language model.

    The first and the last stage are tied.
    """
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * 3)), (("vision", "llm"),)
    )
    stages = tuple(
        Stage("llm", i, (i, i + 1), 1 + 3 * copy + i, copy) for copy in range(2) for i in range(3)
    )
    plan = Plan(graph, (Stage("vision", 0, (0, 1), 0), *stages), MICROBATCHES)
    return replace(plan, schedule=schedule)


def shared_parameters(plan: Plan) -> list[SharedParameter]:
    llm = [stage for stage in plan.stages if stage.module == "llm"]
    listed = [
        [(s, f"linear.{name}") for s in llm if s.index == i]
        for i in range(3) for name in ("weight", "bias")
    ]
    listed.append([(s, "embedding") for s in llm if s.index != 1])
    return [
        SharedParameter(tuple(ParameterReference(s.rank, s.id, name) for s, name in holders))
        for holders in listed
    ]


class Rank:
    """Process of the plan, in a thread."""

    def __init__(self, plan: Plan, rank: int, meetings: Meetings) -> None:
        self.meetings, self.counts = meetings, defaultdict(int)
        processes = Processes(plan)
        rank_of = {stage.id: stage.rank for stage in plan.stages}
        senders, receivers = {}, {}
        for edge in processes.remote_edges:
            pair = rank_of[edge[0]], rank_of[edge[1]]
            link = BlockingLink(meetings, pair, self.counts)
            if rank == pair[0]:
                senders[edge] = SendChannel({0: link}, CPU)
            elif rank == pair[1]:
                receivers[edge] = RecvChannel({0: link}, CPU, PATIENCE, in_order=True)
        self.stages = {
            stage.id: Part(stage.id, stage.module == "llm" and stage.index != 1,
                           stage.module == "llm" and stage.index == 2).eval()
            for stage in plan.rank_stages(rank)
        }
        self.parameters = {
            (stage, name): p for stage, part in self.stages.items()
            for name, p in part.named_parameters()
        }
        shared = shared_parameters(plan)
        groups = {
            s.reduction_group: (rank, s.reduction_group, self)
            for s in shared if rank in s.reduction_group.processes
        }
        self.reduction = GradientReduction(rank, self.parameters, shared, groups, limit=1)
        self.under_way = -1  # number of sums in flight when the last one of the step begins
        self.executor = Executor(
            self.stages, plan.stage_edges, senders, receivers,
            {Op.REDUCE_GRADS: self._reduce, Op.CLIP_GRADS: lambda: None,
             Op.STEP: lambda: None}, reduction=self.reduction,
        )  # fmt: skip

    def _reduce(self) -> None:
        self.under_way = sum(group.started for group in self.reduction._reduction_groups)
        self.reduction.wait()

    def run(self, instructions, issues) -> dict[int, float]:
        program = self.executor.compile(instructions, issues)
        meta = StepMeta(0, 1, ("alike",) * MICROBATCHES, 0)
        for _ in range(STEPS):
            for parameter in self.parameters.values():
                parameter.grad = None
            losses = self.executor.run(program, {}, meta).losses
        return losses


def all_reduce(flat: torch.Tensor, group, async_op: bool) -> Done:
    rank, members, process = group
    number = process.counts[members]
    process.counts[members] += 1
    parts = process.meetings.meet((members, number), rank, len(members.processes), flat.clone())
    flat.copy_(sum(parts))
    return Done()


def run(plan: Plan, program: Program, issues, patience: float) -> list[Rank]:
    meetings = Meetings(patience)
    ranks = [Rank(plan, rank, meetings) for rank in range(plan.num_ranks)]
    with ThreadPoolExecutor(len(ranks)) as threads:
        for result in [
            threads.submit(rank.run, instructions, begins)
            for rank, instructions, begins in zip(ranks, program.ranks, issues, strict=True)
        ]:
            result.result()
    return ranks


def proved(plan: Plan) -> tuple[Program, tuple[tuple[Issue, ...], ...]]:
    held = {shared.reduction_group for shared in shared_parameters(plan)}
    shared = shared_gradients(sorted((group.stages, group.processes) for group in held))
    program = full_program(plan).with_optimizer_ops(OPTIMIZER_OPS)
    return program, check_program(program, shared).issues


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_ends_with_blocking_operations(schedule: str, monkeypatch) -> None:
    """Run two steps: in the first, every message is preceded by its description."""
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    plan = tied_plan(schedule)
    ranks = run(plan, *proved(plan), patience=PATIENCE.total_seconds())
    gradients = {key: p.grad for rank in ranks for key, p in rank.parameters.items()}
    for holders in shared_parameters(plan):
        first, *others = (gradients[h.stage, h.name] for h in holders.references)
        assert first.abs().sum() > 0 and all(torch.equal(first, other) for other in others)
    # The middle stages' sums are in flight while others still compute.
    assert all(ranks[rank].under_way > 0 for rank in (2, 5))


def test_receives_posted_when_awaited_hang(monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    plan = tied_plan("1f1b")
    program, _ = proved(plan)
    awaited = [
        [Issue(n, i.edge) for n, i in enumerate(rank) if i.op is Op.RECV] for rank in program
    ]
    with pytest.raises(RuntimeError, match="no peer came"):  # ChannelError is a subclass
        run(plan, program, awaited, patience=0.5)


def test_a_sum_in_the_last_backward_of_a_tied_stage_hangs(monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    plan = tied_plan("1f1b")
    program, issues = proved(plan)
    last = [max(n for n, i in enumerate(rank) if i.op is Op.BACKWARD) for rank in program]
    early = [
        sorted((issue._replace(before=at) if len(issue.stages) > 1 else issue
                for issue in listed), key=lambda issue: issue.before)
        for at, listed in zip(last, issues, strict=True)
    ]
    with pytest.raises(RuntimeError, match="no peer came"):
        run(plan, program, early, patience=0.5)
