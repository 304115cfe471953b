"""The memory a process of a rank needs: weights, optimizer state, and activations that live at
once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raymm.scheduler.plan.plan import Plan, PlanError
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
    theirs again hold those while their backward runs, one layer at a time; in a group all begin
    before any ends. Not counted: outputs under way to another rank.

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
        elif op is Op.BACKWARD_INPUT:
            continue
        else:  # the microbatch is done with, or never kept anything
            if key in held:
                remade += size.remade_bytes
                peak = max(peak, total + remade)
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
    """Bytes that each process of a rank needs: ``state`` is weights, gradients and optimizer
    moments, ``activations`` the most that live at once."""

    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.state + self.activations


def rank_memory(plan: Plan, program: Program) -> tuple[RankMemory, ...]:
    """Per rank, what a plan with a profile needs under a program."""
    return memory_of(plan, activation_peaks(program, stage_costs(plan)))


def memory_of(plan: Plan, peaks: Sequence[int]) -> tuple[RankMemory, ...]:
    """Per rank, what a plan with a profile needs, if it holds so many bytes of activations."""
    sizes = stage_costs(plan)
    return tuple(
        RankMemory(sum(sizes[s.id].state_bytes for s in plan.rank_stages(rank)), peak)
        for rank, peak in enumerate(peaks)
    )


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
                f"rank {rank} ({names}){several} needs {_size(need.total)}: {_size(need.state)} of "
                f"weights and optimizer state, {_size(need.activations)} of activations; "
                f"memory_limit is {_size(plan.memory_limit)}"
            )


def _size(count: float) -> str:
    """In GiB, unless that would hide by how much a small model is over its limit."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count:,} bytes"
