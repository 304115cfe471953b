"""Partitions of a GPU into whole groups of multiprocessors, and their assignment to modules.

Hardware splits a GPU into groups of :attr:`Multiprocessors.granularity` multiprocessors (SMs).
Modules that run at the same time get disjoint runs of groups, in the order in which they are named.
Two processes that name the same quotas in the same order therefore agree on the layout. Pure
arithmetic; nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from raymm.errors import PlanError

# Tolerance for rounding errors, in sums of quotas such as 0.1 + 0.2 + 0.7 and in products such as
# 24 / 132 times 132.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Multiprocessors:
    """Multiprocessors of one GPU.

    Attributes:
        total: SMs of the GPU that this process may use.
        granularity: SMs per group, the smallest unit of a partition.
        groups: number of groups; fewer than ``total // granularity`` if the hardware's clusters of
            SMs do not divide evenly. By default as many as possible.

    Raises:
        PlanError: a value is not an integer or out of range.
    """

    total: int = 132  # an H100 SXM
    granularity: int = 8  # compute capability 9.0, with whole thread block clusters
    groups: int = -1

    def __post_init__(self) -> None:
        for name in ("total", "granularity", "groups"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise PlanError(f"{name} is {value!r}; accepted: a whole number")
        if self.granularity < 1:
            raise PlanError(f"granularity is {self.granularity}; accepted: 1 or more")
        most = self.total // self.granularity
        if self.groups == -1:
            object.__setattr__(self, "groups", most)
        if not 1 <= self.groups <= most:
            raise PlanError(
                f"groups is {self.groups} for {self.total} multiprocessors in groups of "
                f"{self.granularity}; accepted: 1 to {most}"
            )

    @property
    def smallest_quota(self) -> float:
        return self.granularity / self.total


@dataclass(frozen=True)
class Partition:
    """Multiprocessors that one module of a set got.

    Attributes:
        first_group, groups: range of groups; all groups if ``whole``.
        whole: True if the module has the whole GPU, including multiprocessors outside of any group.
    """

    module: str
    quota: float
    sms: int
    total: int
    first_group: int
    groups: int
    whole: bool = False

    @property
    def asked_sms(self) -> float:
        """Return the number of multiprocessors of the quota before rounding."""
        return self.quota * self.total

    @property
    def share(self) -> float:
        return self.sms / self.total

    def overlaps(self, other: Partition) -> bool:
        if self.whole or other.whole:
            return True
        start = max(self.first_group, other.first_group)
        return start < min(self.first_group + self.groups, other.first_group + other.groups)

    def __str__(self) -> str:
        where = (
            "the whole GPU"
            if self.whole
            else f"groups {self.first_group} to {self.first_group + self.groups - 1}"
        )
        return (
            f"{self.module!r}: requested {self.quota:.4g} ({self.asked_sms:.1f} SMs), granted "
            f"{self.sms} of {self.total} SMs ({self.share:.4g}), {where}"
        )


def partition(quotas: Mapping[str, float], gpu: Multiprocessors) -> tuple[Partition, ...]:
    """Return disjoint partitions for modules that run at the same time on one GPU.

    Each quota is rounded down or up to whole groups, and the sum is rounded to the nearest number
    of groups. Modules with the largest remainders are rounded up, ties in the order of naming. A
    single module with quota 1 gets the whole GPU, which is then not split. If the GPU has fewer
    groups than its number of SMs suggests, the modules with the most groups get fewer. Raise a
    ``PlanError`` if quotas are empty, a quota is below one group's share or above 1, or the sum is
    above 1.

    Args:
        quotas: share of the GPU, in (0, 1], by module, in the order of the layout.
    """
    _check(quotas, gpu)
    if len(quotas) == 1 and next(iter(quotas.values())) >= 1 - ROUNDING:
        (module,) = quotas
        return (Partition(module, quotas[module], gpu.total, gpu.total, 0, gpu.groups, True),)
    counts = _whole_groups([q * gpu.total / gpu.granularity for q in quotas.values()], gpu.groups)
    partitions, first = [], 0
    for (module, quota), groups in zip(quotas.items(), counts, strict=True):
        sms = groups * gpu.granularity
        partitions.append(Partition(module, quota, sms, gpu.total, first, groups))
        first += groups
    return tuple(partitions)


def _check(quotas: Mapping[str, float], gpu: Multiprocessors) -> None:
    if not quotas:
        raise PlanError("quotas are empty; accepted: a share of the GPU for one module or more")
    least = gpu.smallest_quota
    for module, quota in quotas.items():
        if not _is_number(quota):
            raise PlanError(
                f"quota of {module!r} is {quota!r}; accepted: a number from {least:.4g} to 1"
            )
        if not (math.isfinite(quota) and least - ROUNDING <= quota <= 1 + ROUNDING):
            raise PlanError(
                f"quota of {module!r} is {quota} ({quota * gpu.total:.1f} of {gpu.total} "
                f"multiprocessors); accepted: {least:.4g} ({gpu.granularity} multiprocessors, "
                "the smallest partition of this GPU) to 1"
            )
    total = math.fsum(quotas.values())
    if total > 1 + ROUNDING:
        raise PlanError(
            f"quotas {dict(quotas)} of modules that run at the same time sum to {total:.10g}; "
            "accepted: at most 1"
        )
    if len(quotas) > gpu.groups:
        raise PlanError(
            f"quotas name {len(quotas)} modules and the GPU has {gpu.groups} groups of "
            f"multiprocessors; accepted: at most {gpu.groups} modules at the same time"
        )


def _is_number(quota: Any) -> bool:
    """Return True for real numbers that fit a float, including NumPy's; False for bool."""
    if not isinstance(quota, Real) or isinstance(quota, bool):
        return False
    try:
        float(quota)
    except OverflowError:
        return False
    return True


def _whole_groups(exact: list[float], available: int) -> list[int]:
    """Round ``exact`` down or up to counts of at least 1 with a sum of at most ``available``. The
    sum is below ``available`` only if rounding down alone does not fit."""
    counts = [max(1, math.floor(x + ROUNDING)) for x in exact]
    spare = min(available, round(math.fsum(exact))) - sum(counts)
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: max(spare, 0)]:
        if exact[index] - counts[index] > ROUNDING:
            counts[index] += 1
    while sum(counts) > available:
        counts[counts.index(max(counts))] -= 1
    return counts
