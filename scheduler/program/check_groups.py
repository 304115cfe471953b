"""Checks that a device can run the concurrent groups of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.errors import InternalError
from raymm.scheduler.plan.rank_quotas import ROUNDING
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, Instruction, Op


def check_groups(rank: int, instructions: Sequence[Instruction]) -> None:
    """Check that groups consist of adjacent compute instructions on quotas that fit on the device,
    and that each backward has the quota of the forward that kept its activations, because autograd
    runs it on the stream of that forward. Dependencies within a group are not checked; they need
    the plan. Raise ``InternalError`` naming rank and instruction."""
    if all(i.group < 0 and i.quota == 1.0 for i in instructions):
        return
    quotas: dict[int, dict[str, float]] = {}
    forwards: dict[tuple[StageId, int], Instruction] = {}
    last = -1
    for instruction in instructions:
        if instruction.group >= 0:
            in_group = quotas.setdefault(instruction.group, {})
            if instruction.op not in COMPUTE:
                raise InternalError(
                    f"rank {rank}: {instruction}; only compute instructions have groups"
                )
            if in_group and last != instruction.group:
                raise InternalError(
                    f"rank {rank}: {instruction} is separated from the others of its group"
                )
            in_group[instruction.stage.module] = instruction.quota
            if sum(in_group.values()) > 1 + ROUNDING:
                raise InternalError(
                    f"rank {rank}: {instruction} raises the quotas of its group above 1"
                )
        last = instruction.group
        key = instruction.stage, instruction.microbatch
        if instruction.op in (Op.FORWARD, Op.RECOMPUTE):
            forwards[key] = instruction
        elif instruction.op in BACKWARDS and key in forwards:
            forward = forwards[key]
            if (forward.group >= 0, forward.quota) != (instruction.group >= 0, instruction.quota):
                raise InternalError(f"rank {rank}: {instruction} has another quota than {forward}")
