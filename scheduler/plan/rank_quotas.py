"""Quotas: shares of a rank's multiprocessors for modules that run concurrently on it.

A quota is a fraction of the device (Mosaic §3.2). The program decides which tasks of modules with
quotas run side by side (:class:`raymm.scheduler.program.program.Instruction`). A module without a
quota has the whole device while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.plan.stage import Edge, Stage, StageId
from raymm.scheduler.schedules.registry import find_schedule
from raymm.scheduler.schedules.slots import Slots

# Tolerance for rounding in sums of quotas such as 0.1 + 0.2 + 0.7.
ROUNDING = 1e-9


def check_quota(field: str, value: Any) -> None:
    """Raise ``PlanError`` unless a quota is None or a share of a device."""
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value <= 1:  # NaN fails too
        raise PlanError(
            f"{field} is {value!r}; accepted: a share of the multiprocessors, above 0 and at most "
            "1, or none"
        )


def rank_quotas(stages: Sequence[Stage], rank: int) -> dict[str, float]:
    """Return the quotas of the modules on a rank, in the order of ``stages``."""
    return {s.module: s.quota for s in stages if s.rank == rank and s.quota is not None}


def quota_sets(stages: Sequence[Stage], rank: int) -> tuple[dict[str, float], ...]:
    """Return the quotas by module for every set of modules that run concurrently on a rank: those
    of each slot, or without slots of all modules."""
    slots = sorted({s.slot for s in stages if s.rank == rank and s.slot is not None})
    if not slots:
        quotas = rank_quotas(stages, rank)
        return (quotas,) if quotas else ()
    sets = (rank_quotas([s for s in stages if s.slot == slot], rank) for slot in slots)
    return tuple(quotas for quotas in sets if quotas)


def check_quotas(stages: Sequence[Stage], schedule: str) -> None:
    """Check the quotas of a plan as far as possible without its devices. With schedule ``"slots"``,
    the rules for a rank hold for each slot of it. Raise ``PlanError`` if a quota is not a share, is
    on a rank of several processes, or is the only one on the rank; if one module has two quotas on
    a rank; or if the quotas of a rank sum to more than 1."""
    by_rank: dict[tuple[int, int | None], dict[str, Stage]] = {}
    uses_slots = find_schedule(schedule).uses_slots
    for stage in stages:
        check_quota(f"quota of stage {stage.id}", stage.quota)
        key = stage.rank, stage.slot if uses_slots else None
        first = by_rank.setdefault(key, {}).setdefault(stage.module, stage)
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
    for (rank, slot), firsts in by_rank.items():
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
    suffix = "" if slot is None else f" in slot {slot}"
    if total > 1 + ROUNDING:
        raise PlanError(
            f"quotas {dict(quotas)} on rank {rank}{suffix} sum to {total:.4g}; accepted: at most 1"
        )


def check_slots(stages: Sequence[Stage], schedule: str, edges: Sequence[Edge]) -> None:
    """Check the slots of a plan; ``edges`` are only used with schedule ``"slots"``. Raise
    ``PlanError`` for slots without schedule ``"slots"``, or that schedule without slots; for a
    stage that runs no later than a stage that it reads; and for stages that share a slot of a rank
    without being different modules with quotas."""
    if not find_schedule(schedule).uses_slots:
        for stage in stages:
            if stage.slot is not None:
                raise PlanError(
                    f"slot of stage {stage.id} is {stage.slot!r} and schedule {schedule!r}; "
                    f"accepted: slots in schedule {Slots.name!r} only"
                )
        return
    slots: dict[StageId, int] = {}
    by_slot: dict[tuple[int, int], list[Stage]] = {}
    for stage in stages:
        if type(stage.slot) is not int or stage.slot < 0:
            raise PlanError(
                f"slot of stage {stage.id} is {stage.slot!r}; schedule {schedule!r} needs a whole "
                "number from 0 for every stage"
            )
        slots[stage.id] = stage.slot
        by_slot.setdefault((stage.rank, stage.slot), []).append(stage)
    for producer, consumer in edges:
        if slots[consumer] <= slots[producer]:
            raise PlanError(
                f"slot of stage {consumer} is {slots[consumer]} and of {producer}, which it reads, "
                f"{slots[producer]}; accepted: a later one"
            )
    for (rank, slot), concurrent in by_slot.items():
        modules = {stage.module for stage in concurrent}
        if len(concurrent) > 1 and (
            len(modules) < len(concurrent) or any(stage.quota is None for stage in concurrent)
        ):
            names = ", ".join(str(stage.id) for stage in concurrent)
            raise PlanError(
                f"rank {rank} has stages {names} in slot {slot}; accepted: one stage, or stages of "
                "different modules, each with a quota"
            )
