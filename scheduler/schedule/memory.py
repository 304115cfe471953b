"""Memory per process of a rank: weights, optimizer state, and peak activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymm.errors import PlanError
from raymm.scheduler.costs.device_memory import (
    communicator_groups,
    idle_share,
    system_bytes,
)
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, FORWARDS, Op, Program
from raymm.scheduler.schedule.stage_costs import StageCost, stage_costs
from raymm.scheduler.schedule.step_parts import UNKNOWN_SIZES
from raymm.scheduler.schedules.base import Task

GIB = 2**30


def peak_bytes(
    tasks: Sequence[Task], sizes: Mapping[StageId, StageCost],
    spans: Mapping[StageId, int] | None = None,
) -> int:
    """Return the peak bytes of activations of one rank for its tasks, in order.

    A forward keeps its activations until its backward (until B_w if it is split). A checkpointed
    forward keeps its inputs, and its activations from the recomputation on. During their backward,
    layers also hold recomputed activations, one layer at a time, and temporary memory. In a group,
    all tasks begin before any ends. Messages in flight are not counted. ``spans`` are groups of
    microbatches (:func:`~raymm.scheduler.plan.microbatch_groups.group_spans`): the first forward of
    a group keeps the activations of all of them until the group's last backward.
    """
    spans = spans or {}
    counts = Counter(
        (t.stage, t.microbatch // spans[t.stage])
        for t in tasks if t.stage in spans and t.op in FORWARDS
    )
    left = counts.copy()
    held: dict[tuple[StageId, int], int] = {}
    total = peak = remade = freed = 0
    last = -1
    for stage, microbatch, op, group, _ in tasks:
        if group < 0 or group != last:  # the previous group has ended
            total, remade, freed, last = total - freed, 0, 0, group
        size = sizes.get(stage, UNKNOWN_SIZES)
        key = (stage, microbatch)
        if stage in spans:
            key = (stage, microbatch // spans[stage])
            if op is Op.BACKWARD:
                left[key] -= 1
            if left[key] if op is Op.BACKWARD else key in held:
                continue  # another task of the group computes
            size = size.joined(counts[key])
        if op is Op.FORWARD or op is Op.RECOMPUTE:
            added = size.activation_bytes
        elif op is Op.FORWARD_CHECKPOINTED:
            added = size.input_bytes
        else:
            if key in held:  # else the forward kept nothing
                remade += size.remade_bytes
                peak = max(peak, total + remade)
            if op is not Op.BACKWARD_INPUT:  # the last task of the microbatch
                freed += held.pop(key, 0)
            continue
        held[key] = held.get(key, 0) + added
        total += added
        peak = max(peak, total)
    return peak


def activation_peaks(
    program: Program, sizes: Mapping[StageId, StageCost],
    spans: Mapping[StageId, int] | None = None,
) -> tuple[int, ...]:
    """Return :func:`peak_bytes` of each rank of a program. ``sizes`` has the bytes of every
    stage."""
    return tuple(
        peak_bytes(
            [Task(i.stage, i.microbatch, i.op, i.group) for i in rank if i.op in COMPUTE], sizes,
            spans,
        )
        for rank in program.ranks
    )


@dataclass(frozen=True)
class RankMemory:
    """Bytes that each process of a rank needs.

    Attributes:
        state: weights, gradients and optimizer moments.
        activations: peak of activations, including temporary memory.
        messages: messages in flight, and the step's data.
        update: temporary memory at the end of a step, when there are no activations.
        system: communicators, workspaces, and allocator fragmentation.
    """

    state: int
    activations: int
    messages: int = 0
    update: int = 0
    system: int = 0

    @property
    def total(self) -> int:
        return self.state + max(self.activations + self.messages, self.update) + self.system


def rank_memory(plan: Plan, program: Program) -> tuple[RankMemory, ...]:
    """Return the memory of each rank under a program, for a plan with a profile."""
    return memory_of(plan, activation_peaks(program, stage_costs(plan), group_spans(plan)))


def beside_activations(costs: Sequence[StageCost]) -> int:
    """Return the bytes that a rank's stages need together with activations, besides those that wait
    for their backward. ``costs`` are those of all stages of the rank."""
    forward = max((cost.forward_bytes for cost in costs), default=0)
    return forward + sum(cost.state_bytes + cost.message_bytes for cost in costs)


def equal_limits(
    plan: Plan, peaks: Sequence[int], sizes: Mapping[StageId, StageCost]
) -> tuple[int, ...]:
    """Return the bytes of activations per rank that need no more memory than a program with these
    peaks. Devices are equal, so the fullest rank counts (as in Zero Bubble): any rank may hold as
    much as the fullest rank, if weights and optimizer state leave room for it."""
    costs = [
        [sizes[s.id] for s in plan.rank_stages(rank) if s.id in sizes]
        for rank in range(plan.num_ranks)
    ]
    overheads = [beside_activations(cost) for cost in costs]
    device = max(p + b for p, b in zip(peaks, overheads, strict=True))
    # Temporary memory of a backward cannot be reduced by holding fewer microbatches.
    return tuple(
        max(peak, min(max(peaks), device - cost)) - max((c.remade_bytes for c in rank), default=0)
        for peak, cost, rank in zip(peaks, overheads, costs, strict=True)
    )


def memory_of(plan: Plan, peaks: Sequence[int]) -> tuple[RankMemory, ...]:
    """Return the memory of each rank with these peaks of activations, for a plan with a profile."""
    sizes = stage_costs(plan)
    device = "" if plan.profile is None else plan.profile.device
    needs = []
    for rank, peak in enumerate(peaks):
        costs = [
            sizes[stage.id].joined(stage.microbatch_factor) for stage in plan.rank_stages(rank)
        ]
        activations = peak + max((cost.forward_bytes for cost in costs), default=0)
        messages = sum(cost.message_bytes for cost in costs)
        # Stages are updated one after another.
        update = max((cost.update_bytes for cost in costs), default=0)
        system = system_bytes(device, *_communicators(plan, rank))
        system += idle_share(device) * max(activations + messages, update)
        needs.append(RankMemory(
            sum(cost.state_bytes for cost in costs), activations, messages, update, int(system)
        ))
    return tuple(needs)


def _communicators(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the number of links (one each way per rank with messages) and of larger groups."""
    stages = plan.rank_stages(rank)
    peers = {
        plan.by_id[neighbour].rank for stage in stages
        for neighbour in (*plan.stage_producers[stage.id], *plan.stage_consumers[stage.id])
    } - {rank}
    sharers = max(plan.sharers(stage) for stage in stages)
    return 2 * len(peers), communicator_groups(plan.degrees(rank), sharers)


def check_memory(plan: Plan, program: Program) -> None:
    """Raise ``PlanError`` if a rank needs more than the plan's ``memory_limit``; a plan without
    limit or profile passes."""
    if plan.memory_limit is not None and plan.profile is not None:
        check_needs(plan, rank_memory(plan, program))


def check_needs(plan: Plan, needs: Sequence[RankMemory]) -> None:
    """Check known memory needs of each rank like :func:`check_memory`."""
    for rank, need in enumerate(needs):
        if plan.memory_limit is not None and need.total > plan.memory_limit:
            names = ", ".join(str(stage.id) for stage in plan.rank_stages(rank))
            several = f", each of its {n} processes," if (n := plan.processes(rank)) > 1 else ""
            raise PlanError(
                f"rank {rank} ({names}){several} needs {_size(need.total)}: {_text(need)}; "
                f"memory_limit is {_size(plan.memory_limit)}"
            )


def _text(need: RankMemory) -> str:
    """Return a text with the parts of the peak."""
    sizes = {"weights and optimizer state": need.state}
    if need.activations + need.messages >= need.update:
        sizes |= {"activations": need.activations, "messages and data": need.messages}
    else:
        sizes["buffers at the end of a step"] = need.update
    sizes["communicators, workspaces and fragmentation"] = need.system
    return ", ".join(f"{_size(size)} of {purpose}" for purpose, size in sizes.items() if size)


def _size(count: float) -> str:
    """Format in GiB, or in bytes below 1 GiB, so that small differences from a limit stay
    visible."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count:,} bytes"
