"""Shares of a GPU as whole groups of its multiprocessors: rounding, and who gets which group.

Hardware splits a GPU into groups of :attr:`Multiprocessors.granularity` multiprocessors (SMs).
The modules that run at the same time get disjoint runs of groups, laid out in the order in which
they are named: two processes that name the same quotas in the same order agree on who has
which. Pure arithmetic; nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from raymm.errors import PlanError

# Sums of quotas such as 0.1 + 0.2 + 0.7 are 1 but for their rounding, and so is a quota such as
# 24 / 132 times 132.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Multiprocessors:
    """What can be shared of one GPU.

    Attributes:
        total: SMs of the GPU (that this process may use).
        granularity: SMs that are given away together.
        groups: groups of that many; fewer than ``total // granularity`` where the hardware's
            own clusters of SMs do not divide evenly.

    Raises:
        PlanError: a number that is none or not whole; if there is not a single group, or more
            than there are SMs for.
    """

    total: int = 132  # of an H100 SXM
    granularity: int = 8  # of compute capability 9.0, with thread block clusters intact
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
        """The share that one group is."""
        return self.granularity / self.total


@dataclass(frozen=True)
class Partition:
    """What one module of a set got.

    Attributes:
        module: whose it is.
        quota: the share that was asked for.
        sms: multiprocessors granted.
        total: multiprocessors of the GPU.
        first_group, groups: which groups these are; all of the GPU, groups and what is left
            over beside them, where ``whole``.
        whole: the GPU is not split: the module runs alone, on all multiprocessors.
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
        """Multiprocessors that the quota would be without granularity."""
        return self.quota * self.total

    @property
    def share(self) -> float:
        """The share that was granted."""
        return self.sms / self.total

    def overlaps(self, other: Partition) -> bool:
        """Whether the two have a multiprocessor in common."""
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
    """Disjoint partitions for modules that run at the same time on one GPU.

    Every module gets its quota rounded down or up to whole groups, the sum rounded to the
    nearest (largest remainders, then the order of naming, decide who is rounded up). A module
    alone with quota 1 gets the whole GPU, which is then not split. Where the GPU has fewer groups
    than its number of SMs suggests, those with the most groups give some up.

    Args:
        quotas: share of the GPU, in (0, 1], by module, in the order of the layout.
        gpu: what is shared.

    Raises:
        PlanError: no quota, one that is below one group's share or above 1, or a sum above 1.
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
    """Numbers that floating point holds, numpy's too; not bool, which counts as 1 by accident."""
    if not isinstance(quota, Real) or isinstance(quota, bool):
        return False
    try:
        float(quota)
    except OverflowError:
        return False
    return True


def _whole_groups(exact: list[float], available: int) -> list[int]:
    """Counts of at least 1 that are ``exact`` rounded down or up and sum to at most
    ``available`` (below that only where flooring alone does not fit)."""
    counts = [max(1, math.floor(x + ROUNDING)) for x in exact]
    spare = min(available, round(math.fsum(exact))) - sum(counts)
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: max(spare, 0)]:
        if exact[index] - counts[index] > ROUNDING:
            counts[index] += 1
    while sum(counts) > available:
        counts[counts.index(max(counts))] -= 1
    return counts
