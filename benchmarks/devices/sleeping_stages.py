"""Stages that sleep instead of computing, on raymm's own ranks, channels and executor.

Processes that sleep need no core, so pipelines of many ranks run undisturbed on a small machine,
and the ideal duration of every instruction is known exactly.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.devices.emulated_backend import pause
from benchmarks.shared.rank_p2p_groups import p2p_groups_between_ranks
from raymm.actors.executor.step_meta import StepMeta, measured_timeline
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.rank_spec import RankSpec, connection_plans
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import COMPUTE, Op, Program
from raymm.scheduler.program.timeline import Span, Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.stage_costs import StageCost, op_seconds, stage_costs

MESSAGE_FLOATS = 1024
# Overheads are measured on steps with a single microbatch and no work, and on a few with stages of
# known times.
IDLE_STEPS = 20
BUSY_STEPS, BUSY_MICROBATCHES, BUSY_SECONDS = 2, 12, 5e-3
# A message sent this long ago has arrived.
READY_SECONDS = 2e-3


class _SlowGradient(torch.autograd.Function):
    """Identity with a slow backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        pause(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """Stage behind the interface that the executor runs: ``received + weight``.

    Its forward takes ``cost.forward`` seconds, the input gradient ``cost.backward_input`` and the
    weight gradient ``cost.backward_weight``. The two are separate in the autograd graph, so that
    each half of a split backward runs one of them.

    Args:
        cost: seconds; without ``backward_weight`` the stage is frozen and has no weight.
        last: True if it computes the loss.
        loads: factor of the seconds of each microbatch; empty for 1.
    """

    def __init__(
        self, cost: StageCost, width: int, last: bool, loads: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self.loads = tuple(loads)
        self.cost = cost
        self.width = width
        self.last = last
        self.weight = nn.Parameter(torch.zeros(1)) if cost.backward_weight else None
        self.eval()  # no dropout: no seeding per microbatch

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        load = self.loads[context.microbatch] if self.loads else 1.0
        pause(self.cost.forward * load)
        y = next(iter(received.values())).tensors[0] if received else torch.zeros(self.width)
        if y.requires_grad:
            y = _SlowGradient.apply(y, self.cost.backward_input * load)
        if self.weight is not None:
            # An ordinary sum joins the two: the executor could not identify the edge of a custom
            # function that leads to a weight.
            y = y + _SlowGradient.apply(self.weight, self.cost.backward_weight * load)
        return Message((), {}, loss=y.sum()) if self.last else Message((y,), {})


class Renaming(NamedTuple):
    """Renaming of a chain of ``length`` stages to the last ranks of a pipeline of ``ranks`` ranks.

    The ranks of a group keep their stages' names. So that one group can run plans of any number of
    stages, the stages are numbered, and a plan is placed on the last ranks: the loss is always
    computed by the last rank.
    """

    plan: Plan
    ranks: int

    @property
    def offset(self) -> int:
        return self.ranks - self.plan.num_ranks

    @property
    def names(self) -> dict[StageId, StageId]:
        """Return the plan's stages mapped to the group's."""
        return {s.id: rank_stage(self.offset + s.rank) for s in self.plan.stages}

    def program(self, program: Program) -> Program:
        """Return the plan's program in the group's names; further ranks do nothing."""
        names = {**self.names, NO_STAGE: NO_STAGE}
        return Program(
            ((),) * self.offset
            + tuple(
                tuple(i._replace(stage=names[i.stage], peer=names[i.peer]) for i in rank)
                for rank in program.ranks
            )
        )

    def timeline(self, timeline: Timeline) -> Timeline:
        """Return a timeline of the group in the plan's names and ranks."""
        names = {ours: theirs for theirs, ours in self.names.items()} | {NO_STAGE: NO_STAGE}
        return Timeline(
            tuple(
                s._replace(rank=s.rank - self.offset, stage=names[s.stage], peer=names[s.peer])
                for s in timeline.spans
            ),
            self.plan.num_ranks,
        )


def rank_stage(rank: int) -> StageId:
    """Return the stage on a rank of the group."""
    return StageId("chain", rank)


class SleepingPipeline:
    """Ranks whose stages sleep. Runs any plan that is a chain with one stage per rank.

    Args:
        ranks: number of ranks; plans may have fewer.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        nothing = StageCost(0.0, 0.0, 0.0)
        places = {rank_stage(i): i for i in range(ranks)}
        edges = tuple((rank_stage(i), rank_stage(i + 1)) for i in range(ranks - 1))
        specs = [
            RankSpec(
                rank=rank, world_size=ranks,
                builders={rank_stage(rank): partial(SleepingStage, nothing, 1, False)},
                edges=edges, connections=connections,
            )
            for rank, connections in enumerate(
                connection_plans(ranks, p2p_groups_between_ranks(edges, places))
            )
        ]
        labels = [rank_stage(rank) for rank in range(ranks)]
        self._group = RankGroup(specs, labels, RankResources(1.0))

    def run(
        self, plan: Plan, program: Program, steps: int, width: int = MESSAGE_FLOATS,
        loads: Mapping[str, Sequence[float]] | None = None,
    ) -> list[Timeline]:
        """Run a plan's program ``steps`` times.

        Args:
            plan: a chain of at most ``ranks`` stages, with a profile: stages sleep for the seconds
                of :func:`~raymm.scheduler.schedule.stage_costs.stage_costs`.
            loads: factors of these seconds of every microbatch, by module.

        Returns:
            Timeline of each step, in the plan's names.

        Raises:
            ValueError: the plan has too many stages.
            InternalError: the program cannot run.
        """
        if plan.num_ranks > self.ranks:
            raise ValueError(f"the plan has {plan.num_ranks} stages; there are {self.ranks} ranks")
        chain = Renaming(plan, self.ranks)
        costs = {chain.names[name]: cost for name, cost in stage_costs(plan).items()}
        factors = {
            chain.names[name]: tuple(map(float, (loads or {}).get(name.module, ())))
            for name in plan.by_id
        }
        self._group.rebuild([
            {name: partial(SleepingStage, costs.get(name, StageCost(0.0, 0.0, 0.0)), width,
                           rank == self.ranks - 1, factors.get(name, ()))}
            for rank, name in enumerate(map(rank_stage, range(self.ranks)))
        ])
        renamed = chain.program(program)
        proof = check_program(renamed)
        key = self._group.load_program(renamed, proof.issues, proof.bound)
        # The width determines a message's layout.
        meta = StepMeta(step=0, label_tokens=1, keys=(width,) * plan.num_microbatches)
        empty: list[list] = [[] for _ in range(self.ranks)]
        return [
            chain.timeline(measured_timeline(self._group.submit(key, meta, empty).result()))
            for _ in range(steps)
        ]

    def overheads(self, width: int = MESSAGE_FLOATS) -> Overheads:
        """Measure the overheads of instructions.

        Uses separate runs on chains over all ranks: one microbatch through stages that take no
        time, so that every receiver waits for its message; and every compute op on stages of known
        times.
        """
        idle = chain_plan(self.ranks, 0.0, 1)
        messages = self.run(idle, full_program(idle), IDLE_STEPS + 1, width)[1:]
        extra: dict[Op, list[float]] = {}
        for trainable, recompute in ((True, False), (True, True), (False, False)):
            plan = chain_plan(self.ranks, BUSY_SECONDS, BUSY_MICROBATCHES, trainable, recompute)
            nominal = op_seconds(plan)
            for timeline in self.run(plan, full_program(plan), BUSY_STEPS + 1, width)[1:]:
                for s in timeline.compute():
                    late = s.end - s.start - nominal[s.stage, Op(s.op)]
                    extra.setdefault(Op(s.op), []).append(late)
                for s in timeline.spans:
                    if s.op == Op.SEND:
                        extra.setdefault(Op.SEND, []).append(s.end - s.start)
                extra.setdefault(Op.RECV, []).extend(ready_receives(timeline))
        return Overheads(
            statistics.median(x for one in messages for x in message_seconds(one)),
            {op: statistics.median(values) for op, values in extra.items()},
        )

    def close(self) -> None:
        """Stop the ranks."""
        self._group.shutdown()


class Overheads(NamedTuple):
    """Overheads of a step in addition to the stages' work, in seconds.

    Attributes:
        message: from the start of a SEND to the end of the RECV that waits for it.
        per_op: overhead of one instruction: of a compute op without its stage's time, of a SEND, of
            a RECV whose message has already arrived.
    """

    message: float
    per_op: dict[Op, float]

    @property
    def latency(self) -> float:
        """Return a message's latency without the instructions at its two ends."""
        ends = self.per_op.get(Op.SEND, 0.0) + self.per_op.get(Op.RECV, 0.0)
        return max(0.0, self.message - ends)

    def added_to(
        self, costs: Mapping[tuple[str, Op], float], program: Program
    ) -> dict[tuple[StageId, Op], float]:
        """Return costs per (stage, compute op) with the overhead of the op and of its messages.

        These are receives before and sends after the op; all microbatches have the same number.
        """
        around: dict[tuple[str, Op], list[float]] = {}
        for rank in program.ranks:
            pending, last = 0.0, None
            for instruction in rank:
                seconds = self.per_op.get(instruction.op, 0.0)
                if instruction.op in COMPUTE:
                    last = around.setdefault((instruction.stage, instruction.op), [])
                    last.append(seconds + pending)
                    pending = 0.0
                elif instruction.op is Op.SEND and last is not None:
                    last[-1] += seconds
                elif instruction.op is Op.RECV:
                    pending += seconds
        return {
            key: costs.get(key, 0.0) + statistics.fmean(values) for key, values in around.items()
        }


def chain_plan(
    ranks: int, seconds: float, microbatches: int, trainable: bool = True, recompute: bool = False
) -> Plan:
    """Return a chain of stages on which F, B_d and B_w take ``seconds`` each, under zero bubble.

    Args:
        trainable: True to train all stages; False to train only the middle one, so that earlier
            stages have no backward and later ones no B_w.
        recompute: True to recompute in every stage with a full backward, except the last.
    """
    middle = ranks // 2
    flags = tuple(trainable or rank == middle for rank in range(ranks))
    # A weight gradient takes at least an instant, or the stage would have no weight.
    layer = LayerCost(seconds, seconds, max(seconds, 1e-9), activation_bytes=16, output_bytes=1)
    stages = tuple(
        Stage("idle", i, (i, i + 1), i, recompute=recompute and i < ranks - 1)
        for i in range(ranks)
    )
    return Plan(
        ModuleGraph((ModuleNode("idle", flags),), ()), stages, microbatches, "zero_bubble",
        CostProfile({"idle": (layer,) * ranks}),
    )


def _messages(timeline: Timeline) -> list[tuple[Span, Span]]:
    """Return (SEND, RECV) of every message that has spans at both ends.

    A measured timeline has all, a simulated one no SENDs.
    """
    sent = {(s.stage, s.peer, s.microbatch): s for s in timeline.spans if s.op == Op.SEND}
    return [
        (sent[key], s) for s in timeline.spans
        if s.op == Op.RECV and (key := (s.peer, s.stage, s.microbatch)) in sent
    ]


def message_seconds(timeline: Timeline) -> list[float]:
    """Return seconds from the start of the SEND to the end of the RECV, for every message."""
    return [received.end - sent.start for sent, received in _messages(timeline)]


def ready_receives(timeline: Timeline) -> list[float]:
    """Return seconds of every RECV that began long after its SEND ended, and so did not wait."""
    return [
        received.end - received.start for sent, received in _messages(timeline)
        if received.start > sent.end + READY_SECONDS
    ]


def op_seconds_measured(timelines: Sequence[Timeline]) -> dict[tuple[StageId, Op], float]:
    """Return median seconds per (stage, compute op) over several steps."""
    found: dict[tuple[str, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline.compute():
            found.setdefault((span.stage, Op(span.op)), []).append(span.end - span.start)
    return {key: statistics.median(values) for key, values in found.items()}
