"""Quotas: the shares of a rank's multiprocessors that modules colocated on it run on.

A quota is a fraction of the device (Mosaic §3.2). Modules with quotas on one rank may run side
by side; which of their tasks do is said by the program (:class:`raymm.scheduler.program.program.
Instruction`). A module without a quota has the whole device while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.plan.stage import Edge, Stage, StageId

SLOTS = "slots"
"""The schedule in which stages run in slots."""
# Sums of quotas such as 0.1 + 0.2 + 0.7 are 1 but for their rounding.
ROUNDING = 1e-9


def check_quota(field: str, value: Any) -> None:
    """
    Raises:
        PlanError: if a quota is neither None nor a share of a device.
    """
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value <= 1:  # NaN fails too
        raise PlanError(
            f"{field} is {value!r}; accepted: a share of the multiprocessors, above 0 and at most "
            "1, or none"
        )


def rank_quotas(stages: Sequence[Stage], rank: int) -> dict[str, float]:
    """By module, the quotas on a rank, in the order of ``stages``."""
    return {s.module: s.quota for s in stages if s.rank == rank and s.quota is not None}


def quota_sets(stages: Sequence[Stage], rank: int) -> tuple[dict[str, float], ...]:
    """By module, the quotas on a rank that are of one time: all, or in slots those of each."""
    slots = sorted({s.slot for s in stages if s.rank == rank and s.slot is not None})
    if not slots:
        quotas = rank_quotas(stages, rank)
        return (quotas,) if quotas else ()
    sets = (rank_quotas([s for s in stages if s.slot == slot], rank) for slot in slots)
    return tuple(quotas for quotas in sets if quotas)


def check_quotas(stages: Sequence[Stage], schedule: str) -> None:
    """What can be said of a plan's quotas without its devices.

    Args:
        stages: of the plan.
        schedule: of the plan; with slots, what is said below of a rank is said of a slot of it.

    Raises:
        PlanError: a quota that is no share; one on a rank of several processes, or without another
            module's on the rank; two of one module on one rank; quotas of a rank above 1 in all.
    """
    of_rank: dict[tuple[int, int | None], dict[str, Stage]] = {}
    for stage in stages:
        check_quota(f"quota of stage {stage.id}", stage.quota)
        place = stage.rank, stage.slot if schedule == SLOTS else None
        first = of_rank.setdefault(place, {}).setdefault(stage.module, stage)
        if stage.quota != first.quota:
            raise PlanError(
                f"quota of stage {stage.id} is {stage.quota} and of {first.id} {first.quota}; "
                f"all stages of {stage.module!r} on rank {stage.rank} must have the same"
            )
        if stage.quota is not None and math.prod(stage.degrees) > 1:
            degrees = ", ".join(f"{n} {d}" for n, d in stage.degrees._asdict().items() if d > 1)
            raise PlanError(
                f"quota of stage {stage.id} is {stage.quota} and its {degrees}; accepted: quotas "
                "on ranks of one process, because processes that share a module's work must "
                "run collectives in the same order"
            )
    for (rank, slot), firsts in of_rank.items():
        _check_rank(rank, slot, rank_quotas(list(firsts.values()), rank), firsts)


def _check_rank(
    rank: int, slot: int | None, quotas: Mapping[str, float], stages: Mapping[str, Stage]
) -> None:
    if len(quotas) == 1 and slot is None:
        (module,) = quotas
        raise PlanError(
            f"quota of stage {stages[module].id} is {quotas[module]}, and no other module has "
            f"one on rank {rank}; accepted: quotas of two modules or more that share a rank"
        )
    total = math.fsum(quotas.values())
    where = "" if slot is None else f" in slot {slot}"
    if total > 1 + ROUNDING:
        raise PlanError(
            f"quotas {dict(quotas)} on rank {rank}{where} sum to {total:.4g}; accepted: at most 1"
        )


def check_slots(stages: Sequence[Stage], schedule: str, edges: Sequence[Edge]) -> None:
    """
    Args:
        stages: of the plan.
        schedule: of the plan.
        edges: between the stages, if the schedule is that of slots.

    Raises:
        PlanError: slots without that schedule, or the schedule without them; a stage that does not
            run after what it reads; several stages in a slot of a rank that are not all of other
            modules, each on a quota.
    """
    if schedule != SLOTS:
        for stage in stages:
            if stage.slot is not None:
                raise PlanError(
                    f"slot of stage {stage.id} is {stage.slot!r} and schedule {schedule!r}; "
                    f"accepted: slots in schedule {SLOTS!r} only"
                )
        return
    slots: dict[StageId, int] = {}
    together: dict[tuple[int, int], list[Stage]] = {}
    for stage in stages:
        if type(stage.slot) is not int or stage.slot < 0:
            raise PlanError(
                f"slot of stage {stage.id} is {stage.slot!r}; schedule {SLOTS!r} needs a whole "
                "number from 0 for every stage"
            )
        slots[stage.id] = stage.slot
        together.setdefault((stage.rank, stage.slot), []).append(stage)
    for producer, consumer in edges:
        if slots[consumer] <= slots[producer]:
            raise PlanError(
                f"slot of stage {consumer} is {slots[consumer]} and of {producer}, which it reads, "
                f"{slots[producer]}; accepted: a later one"
            )
    for (rank, slot), own in together.items():
        modules = {stage.module for stage in own}
        if len(own) > 1 and (
            len(modules) < len(own) or any(stage.quota is None for stage in own)
        ):
            names = ", ".join(str(stage.id) for stage in own)
            raise PlanError(
                f"rank {rank} has stages {names} in slot {slot}; accepted: one stage, or stages of "
                "different modules, each with a quota"
            )
