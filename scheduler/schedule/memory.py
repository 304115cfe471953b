"""The memory a process of a rank needs: weights, optimizer state, and activations that live at
once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raymm.errors import PlanError
from raymm.scheduler.costs.device_memory import (
    communicator_groups,
    idle_share,
    system_bytes,
)
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, Op, Program
from raymm.scheduler.schedule.schedule_rules import Task
from raymm.scheduler.schedule.stage_costs import StageCost, stage_costs
from raymm.scheduler.schedule.step_parts import UNKNOWN_SIZES

GIB = 2**30


def peak_bytes(tasks: Iterable[Task], sizes: Mapping[StageId, StageCost]) -> int:
    """The most bytes of activations that one rank holds at any time.

    A forward keeps its activations until its backward (B_w where it is split), a checkpointed
    one its inputs, and from its recomputation on its activations too. Layers that make some of
    theirs again hold those while their backward runs, one layer at a time, and what they work
    with; in a group all begin before any ends. Not counted: messages under way.

    Args:
        tasks: of the rank, in order.
        sizes: bytes per stage.
    """
    held: dict[tuple[StageId, int], int] = {}
    total = peak = remade = freed = 0
    last = -1
    for stage, microbatch, op, group, _ in tasks:
        if group < 0 or group != last:  # what went before has ended
            total, remade, freed, last = total - freed, 0, 0, group
        size = sizes.get(stage, UNKNOWN_SIZES)
        key = (stage, microbatch)
        if op is Op.FORWARD or op is Op.RECOMPUTE:
            more = size.activation_bytes
        elif op is Op.FORWARD_CHECKPOINTED:
            more = size.input_bytes
        else:
            if key in held:  # else nothing was ever kept
                remade += size.remade_bytes
                peak = max(peak, total + remade)
            if op is not Op.BACKWARD_INPUT:  # the microbatch is done with
                freed += held.pop(key, 0)
            continue
        held[key] = held.get(key, 0) + more
        total += more
        peak = max(peak, total)
    return peak


def activation_peaks(program: Program, sizes: Mapping[StageId, StageCost]) -> tuple[int, ...]:
    """Per rank, :func:`peak_bytes` of a program.

    Args:
        program: what the ranks do.
        sizes: bytes of every stage.
    """
    return tuple(
        peak_bytes(
            [Task(i.stage, i.microbatch, i.op, i.group) for i in rank if i.op in COMPUTE], sizes
        )
        for rank in program.ranks
    )


@dataclass(frozen=True)
class RankMemory:
    """Bytes that each process of a rank needs.

    Attributes:
        state: weights, gradients and optimizer moments.
        activations: the most that live at once, with what computing takes for a time.
        messages: that are under way, and the step's data.
        update: what the end of a step takes for itself, when activations are gone.
        system: communicators, workspaces, and what the allocator cannot use.
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
    """Per rank, what a plan with a profile needs under a program."""
    return memory_of(plan, activation_peaks(program, stage_costs(plan)))


def beside_activations(costs: Sequence[StageCost]) -> int:
    """Bytes that a rank's stages need while activations are there, beside those that wait for their
    backward.

    Args:
        costs: of all stages of the rank.
    """
    forward = max((cost.forward_bytes for cost in costs), default=0)
    return forward + sum(cost.state_bytes + cost.message_bytes for cost in costs)


def memory_of(plan: Plan, peaks: Sequence[int]) -> tuple[RankMemory, ...]:
    """Per rank, what a plan with a profile needs, if it holds so many bytes of activations."""
    sizes = stage_costs(plan)
    device = "" if plan.profile is None else plan.profile.device
    needs = []
    for rank, peak in enumerate(peaks):
        own = [sizes[stage.id] for stage in plan.rank_stages(rank)]
        activations = peak + max((cost.forward_bytes for cost in own), default=0)
        messages = sum(cost.message_bytes for cost in own)
        # One stage after another.
        update = max((cost.update_bytes for cost in own), default=0)
        system = system_bytes(device, *_communicators(plan, rank))
        system += idle_share(device) * max(activations + messages, update)
        needs.append(RankMemory(
            sum(cost.state_bytes for cost in own), activations, messages, update, int(system)
        ))
    return tuple(needs)


def _communicators(plan: Plan, rank: int) -> tuple[int, int]:
    """A link each way with every rank that a rank has messages with, and groups."""
    stages = plan.rank_stages(rank)
    others = {
        plan.by_id[other].rank for stage in stages
        for other in (*plan.stage_producers[stage.id], *plan.stage_consumers[stage.id])
    } - {rank}
    sharers = max(plan.sharers(stage) for stage in stages)
    return 2 * len(others), communicator_groups(plan.degrees(rank), sharers)


def check_memory(plan: Plan, program: Program) -> None:
    """
    Raises:
        PlanError: if a rank needs more than the plan's ``memory_limit``; a plan without
            limit or profile passes.
    """
    if plan.memory_limit is not None and plan.profile is not None:
        check_needs(plan, rank_memory(plan, program))


def check_needs(plan: Plan, needs: Sequence[RankMemory]) -> None:
    """:func:`check_memory` of what is known to be needed, per rank."""
    for rank, need in enumerate(needs):
        if plan.memory_limit is not None and need.total > plan.memory_limit:
            names = ", ".join(str(stage.id) for stage in plan.rank_stages(rank))
            several = f", each of its {n} processes," if (n := plan.processes(rank)) > 1 else ""
            raise PlanError(
                f"rank {rank} ({names}){several} needs {_size(need.total)}: {_text(need)}; "
                f"memory_limit is {_size(plan.memory_limit)}"
            )


def _text(need: RankMemory) -> str:
    """What it is for, of what counts at the time of the most."""
    parts = {"weights and optimizer state": need.state}
    if need.activations + need.messages >= need.update:
        parts |= {"activations": need.activations, "messages and data": need.messages}
    else:
        parts["the end of a step"] = need.update
    parts["communicators, workspaces and fragments"] = need.system
    return ", ".join(f"{_size(size)} of {what}" for what, size in parts.items() if size)


def _size(count: float) -> str:
    """In GiB, unless that would hide by how much a small model is over its limit."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count:,} bytes"
