"""Quotas: the shares of a rank's multiprocessors that modules colocated on it run on.

A quota is a fraction of the device (Mosaic §3.2). Modules with quotas on one rank may run side
by side; which of their tasks do is said by the program (:class:`raymm.scheduler.program.program.
Instruction`). A module without a quota has the whole device while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raymm.scheduler.plan.plan_error import PlanError
from raymm.scheduler.plan.stage import Stage

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


def check_quotas(stages: Sequence[Stage]) -> None:
    """What can be said of a plan's quotas without its devices.

    Raises:
        PlanError: a quota that is no share; one on a rank of several processes, or without another
            module's on the rank; two of one module on one rank; quotas of a rank above 1 in all.
    """
    of_rank: dict[int, dict[str, Stage]] = {}
    for stage in stages:
        check_quota(f"quota of stage {stage.id}", stage.quota)
        first = of_rank.setdefault(stage.rank, {}).setdefault(stage.module, stage)
        if stage.quota != first.quota:
            raise PlanError(
                f"quota of stage {stage.id} is {stage.quota} and of {first.id} {first.quota}; "
                f"all stages of {stage.module!r} on rank {stage.rank} must have the same"
            )
        if stage.quota is not None and math.prod(stage.degrees) > 1:
            degrees = ", ".join(f"{n} {d}" for n, d in stage.degrees._asdict().items() if d > 1)
            raise PlanError(
                f"quota of stage {stage.id} is {stage.quota} and its {degrees}; accepted: quotas "
                "on ranks of one process, because processes that share a module's work must meet "
                "in the same order"
            )
    for rank, firsts in of_rank.items():
        _check_rank(rank, rank_quotas(list(firsts.values()), rank), firsts)


def _check_rank(rank: int, quotas: Mapping[str, float], stages: Mapping[str, Stage]) -> None:
    if len(quotas) == 1:
        (module,) = quotas
        raise PlanError(
            f"quota of stage {stages[module].id} is {quotas[module]}, and no other module has "
            f"one on rank {rank}; accepted: quotas of two modules or more that share a rank"
        )
    total = math.fsum(quotas.values())
    if total > 1 + ROUNDING:
        raise PlanError(
            f"quotas {dict(quotas)} on rank {rank} sum to {total:.4g}; accepted: at most 1"
        )
