"""OmniBal's Iterative Sampling and Filtering (ISF), Algorithms 1 and 2 of §4.1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from benchmarks.baselines.baseline import Baseline
from raymm.errors import PlanError
from raymm.scheduler.minibatch.metrics import dist_ratio, loads
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes, checked, generator

# A group is full when it is within this margin of the budget of the padded modalities (§5.1: Q'_t =
# Q_t - 128).
MARGIN = 128
# Start of the search, rounding of lengths during the search, and tokens per tile at its lower end.
FIRST_BUDGET = 4096
LENGTH_BIN = 256
RATIO_STEP = 16


def statistical_budgets(sizes: SampleSizes, longest: int | None = None) -> tuple[int, ...]:
    """Return Q as §5.1 defines it.

    The last modality gets its longest sample (or ``longest``), the others their share of it by the
    ratio of totals, and each at least the size of one sample.

    Raises:
        PlanError: the last modality is empty.
    """
    if not sizes.totals[-1]:
        raise PlanError(f"there are no units of {sizes.names[-1]} to start from")
    longest = int(sizes.values[:, -1].max()) if longest is None else longest
    others = [
        max(int(longest * total / sizes.totals[-1]), int(sizes.values[:, column].max()))
        for column, total in enumerate(sizes.totals[:-1])
    ]
    return (*others, longest)


def plan_isf(
    sizes: SampleSizes,
    ranks: int,
    budgets: Sequence[int] | None = None,
    *,
    full: Sequence[int] | None = None,
    iterations: int = 10,
    keep_rest: bool = True,
    seed: int = 0,
    epoch: int = 0,
) -> MiniBatchPlan:
    """Plan with ISF: sample groups, keep those that are full in one modality, repeat.

    Groups are assigned to steps in random order. Groups that do not fill a whole step, and samples
    above a budget, are left out.

    Args:
        budgets: Q, the limits of a group. Default: :func:`statistical_budgets`.
        full: Q', minimum size of a kept group. Default: Q, less 128 for padded modalities.
        iterations: T, rounds of sampling and filtering (the paper uses 10).
        keep_rest: also use the groups that are not full after the last round, as the authors' code
            does; Algorithm 2 leaves their samples out.

    Raises:
        PlanError: fewer groups than ranks, budgets or iterations out of range.
    """
    checked(sizes, ranks)
    budgets = statistical_budgets(sizes) if budgets is None else tuple(int(q) for q in budgets)
    if len(budgets) != len(sizes.names) or min(budgets) < 1:
        raise PlanError(
            f"budgets must be {len(sizes.names)} numbers above 0, one for each of {sizes.names}, "
            f"got {budgets}"
        )
    if iterations < 1:
        raise PlanError(f"iterations must be at least 1, got {iterations}")
    if full is None:
        full = [
            budget - MARGIN * (name in sizes.padded)
            for name, budget in zip(sizes.names, budgets, strict=True)
        ]
    random = generator(seed, epoch)
    samples, offsets = isf_groups(
        sizes.values, np.array(budgets), np.array(full), iterations, keep_rest, random
    )
    groups = (len(offsets) - 1) // ranks * ranks
    if not groups:
        raise PlanError(
            f"ISF found {len(offsets) - 1} groups with budgets {budgets}, fewer than the {ranks} "
            "ranks: give smaller budgets or more samples"
        )
    chosen = random.permutation(len(offsets) - 1)[:groups]
    parts = [samples[offsets[g] : offsets[g + 1]] for g in chosen]
    planned = np.concatenate(parts)
    left_out = np.setdiff1d(np.arange(len(sizes)), planned)
    return MiniBatchPlan(
        method="isf", ranks=ranks, samples=planned,
        offsets=np.cumsum([0, *map(len, parts)]), left_out=left_out, packed=True,
        budgets=budgets, seed=seed, epoch=epoch,
    )


def isf_groups(
    values: np.ndarray, budgets: np.ndarray, full: np.ndarray, iterations: int, keep_rest: bool,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Run Algorithms 1 and 2.

    Args:
        values: (N, M) units of every sample.
        budgets: (M,) limits of a group.
        full: (M,) minimum size of a full group.
        keep_rest: True to include groups that are not full after the last round.

    Returns:
        (n,) samples of all groups, and (groups + 1,) their offsets.
    """
    left = np.flatnonzero((values <= budgets).all(1))
    kept: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    for iteration in range(iterations):
        order = random.permutation(left)
        stops, is_full = _sample_and_filter(values, order, budgets, full)
        if keep_rest and iteration == iterations - 1:
            is_full[:] = True
        group = np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))
        kept.append(order[is_full[group]])
        ends.append(np.diff(stops, prepend=0)[is_full])
        left = order[~is_full[group]]
        if not len(left):
            break
    return np.concatenate(kept), np.cumsum(np.concatenate([[0], *ends]))


@njit(cache=True)
def _sample_and_filter(values, order, budgets, full):
    """Cut the order at each exceeded budget; mark the groups that are full in any modality."""
    columns = values.shape[1]
    stops = np.empty(order.shape[0], np.int64)
    is_full = np.empty(order.shape[0], np.bool_)
    sums = np.zeros(columns, np.int64)
    groups = 0
    for i in range(order.shape[0]):
        exceeds = False
        for c in range(columns):
            exceeds = exceeds or sums[c] + values[order[i], c] > budgets[c]
        if exceeds:
            stops[groups] = i
            is_full[groups] = (sums >= full).any()
            groups += 1
            sums[:] = 0
        for c in range(columns):
            sums[c] += values[order[i], c]
    if order.shape[0]:
        stops[groups] = order.shape[0]
        is_full[groups] = (sums >= full).any()
        groups += 1
    return stops[:groups], is_full[:groups]


def search_budgets(
    sizes: SampleSizes, ranks: int, batch: int = 4, *, iterations: int = 50, seed: int = 0
) -> tuple[int, ...]:
    """Search Q as the authors' code does.

    Start at 4096 units of the last modality and increase the first by one unit, the others by their
    ratio to it, until groups have more than ``batch + 1`` samples. If they have too many at the
    start, decrease until some have ``batch`` to ``batch + 1``. Among these candidates, return the Q
    with the least sum of DistRatios. Ratios are of lengths rounded up to 256, which leaves room in
    all but the first.

    Args:
        iterations: ISF rounds per candidate.

    Raises:
        PlanError: the first modality is empty, or no budget makes groups of this size.
    """
    checked(sizes, ranks)
    if not sizes.totals[0]:
        raise PlanError(f"there are no units of {sizes.names[0]} to search by")
    mean = max(sizes.totals[0] / len(sizes), 1.0)
    ratios = []
    for column, name in enumerate(sizes.names[1:], 1):
        if name in sizes.padded:
            rounded = -(-sizes.values[:, column] // LENGTH_BIN) * LENGTH_BIN
            ratio = (rounded.mean() // mean + 1) // RATIO_STEP * RATIO_STEP
            ratios.append(max(float(RATIO_STEP), ratio))
        else:
            ratios.append(sizes.totals[column] / len(sizes) / mean)
    unit = max(1, int(FIRST_BUDGET // ratios[-1])) if ratios else FIRST_BUDGET
    filled: list[tuple[float, tuple[int, ...]]] = []
    largest, tried = 0.0, []
    while unit >= 1 and (largest <= batch + 1 or not filled):
        budgets = (unit, *(max(1, math.ceil(ratio * unit)) for ratio in ratios))
        tried.append(unit)
        try:
            plan = plan_isf(sizes, ranks, budgets, iterations=iterations, seed=seed)
            average = len(plan.samples) / plan.groups
        except PlanError:  # too few groups count as too large
            average = math.inf if unit >= max(tried) else 0.0
        if batch <= average <= batch + 1:
            of_ranks = loads(plan, sizes)
            score = sum(dist_ratio(of_ranks[:, :, column]) for column in range(len(budgets)))
            filled.append((score, budgets))
        largest = max(largest, average)
        unit += 1 if largest <= batch + 1 else -1
    if not filled:
        raise PlanError(
            f"no budgets make groups of {batch} to {batch + 1} samples; tried {min(tried)} to "
            f"{max(tried)} units of {sizes.names[0]}"
        )
    return min(filled)[1]


MINIBATCHES: tuple[Baseline[tuple[SampleSizes, int], MiniBatchPlan], ...] = (
    Baseline("isf", "OmniBal §4.1", lambda problem: plan_isf(*problem)),
)
"""Planners: (sizes of all samples, number of ranks) -> plan of an epoch."""
