"""Mini-batches whose groups are equally large in every modality, in every step.

OmniBal's ISF draws groups until they happen to be full and drops the rest. Here the number of steps
is fixed first, and the samples are split into exactly that many groups:

1. The samples, sorted by size, are assigned at random to *pools* of a few steps each, so that every
   pool has the same distribution of sizes, and other samples in every epoch.
2. The samples of a pool are levelled over its groups (:mod:`raymm.scheduler.minibatch.levelling`):
   equal in every modality, in cost, and in the mix of data sets. Samples larger than the mean group
   share steps if that reduces waiting; the other groups of these steps are filled up to them.
   Samples that fit in no group continue to the next pool; the last pool gets more steps if
   necessary.
3. All groups are sorted by size and cut into steps of nearly equal groups. Exchanges of samples
   between steps equalise the mix of data sets, and exchanges within steps the sizes.
4. The ranks within each step are shuffled, and steps are ordered in waves of rising and falling
   cost, so that steps in flight together in a pipeline take about equally long.

With measured costs (:mod:`raymm.scheduler.minibatch.measured_costs`), the seconds of every module
are levelled, and units only count for budgets. If replicas of a module differ in speed, the samples
of every step are finally redistributed over its groups. If replicas split every group by samples,
the samples of each group are ordered for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from raymm.errors import PlanError
from raymm.scheduler.minibatch.budgets import least_groups, suggest_budgets
from raymm.scheduler.minibatch.costs import CostModel, even_costs
from raymm.scheduler.minibatch.grouping import MANY_GROUPS, Groups, split_into_groups
from raymm.scheduler.minibatch.levelling import exchange_steps, spread_sources
from raymm.scheduler.minibatch.measured_costs import PARTS, MeasuredCosts
from raymm.scheduler.minibatch.problem import (
    MiniBatchPlan,
    SampleSizes,
    checked,
    checked_budgets,
    generator,
)
from raymm.scheduler.minibatch.replica_shares import split_over_replicas

# Weights of cost and of data sets, relative to 1 for each modality.
COST_WEIGHT = 0.3
SOURCE_WEIGHT = 0.3
# Exchanges in a step end when its groups exceed the mean by less than this fraction of it.
TOLERANCE = 2e-4
TRIES = 200
# Number of groups of a step that are considered for an exchange.
CANDIDATES = 8
# Scale of units next to measured costs, so that they count for budgets and hardly otherwise.
UNMEASURED = 1e-3
# Steps ordered by cost alone must take at most this fraction of the time, because their groups
# differ more in each modality.
WORTH_IT = 0.998
# Number of steps from one longest step to the next.
WAVE_STEPS = 64
# Groups whose sizes differ by less than this are treated as equal, so that steps mix several data
# sets.
ALIKE = 0.01
# Rounds in which every sample of a microbatch may be exchanged for a better one.
ROUNDS = 8


def plan_balanced(
    sizes: SampleSizes,
    ranks: int,
    budgets: Sequence[int] | None = None,
    *,
    samples_per_group: float = 4.0,
    model: CostModel | None = None,
    measured: MeasuredCosts | None = None,
    source_weight: float = SOURCE_WEIGHT,
    alike: float | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> MiniBatchPlan:
    """Plan an epoch in which every sample is used exactly once.

    Args:
        budgets: most units of a group per modality. Default: those of
            :func:`raymm.scheduler.minibatch.budgets.suggest_budgets` for ``samples_per_group``.
        samples_per_group: approximate number of samples per group, if there are no budgets.
        model: costs of samples; default: every modality costs the same over the whole data.
        measured: measured costs, instead of ``model``. If the replicas of a module differ in speed,
            group g of a step is for replica g mod n, and groups for fast replicas may be larger
            than the others, but not than given ``budgets``.
        source_weight: weight of the mix of data sets relative to sizes; 0 to ignore it.
        alike: groups whose sizes differ by less than this fraction of the mean group are assigned
            to steps at random: 0 for the best balance; at 1 steps mix groups of all sizes. Default:
            :data:`ALIKE` for several data sets, 0 for one.
        seed, epoch: equal numbers give equal plans on every machine; every epoch differs.

    Returns:
        A packed plan with all samples. Some groups are empty if there are fewer samples than groups
        (tiny data whose samples need a group each).

    Raises:
        PlanError: fewer samples than ranks, a sample above a budget, or an option out of range.
    """
    checked(sizes, ranks)
    if source_weight < 0:
        raise PlanError(f"source_weight must not be negative, got {source_weight}")
    if alike is None:
        alike = ALIKE if sizes.sources.any() else 0.0
    if not 0 <= alike <= 1:
        raise PlanError(f"alike must be from 0 to 1, got {alike}")
    random = generator(seed, epoch)
    suggested = budgets is None
    if budgets is None:
        budgets = suggest_budgets(sizes, samples_per_group)
    budgets = checked_budgets(sizes, budgets)
    least = max(1, -(-least_groups(sizes, budgets) // ranks))
    columns = _columns(sizes, budgets, model, measured, source_weight)
    groups = split_into_groups(
        columns.features, columns.limits, len(sizes.names), columns.cost, ranks, least, random
    )
    samples, offsets = _steps(sizes, columns, groups, ranks, alike, random)
    if measured is not None and measured.replicas.keys() - measured.shared:
        hard = np.full(len(budgets), np.inf) if suggested else np.array(budgets)
        samples, offsets = split_over_replicas(samples, offsets, ranks, sizes, measured, hard)
    if measured is not None:
        samples = order_for_shares(samples, offsets, sizes, measured)
    return MiniBatchPlan(
        method="balanced", ranks=ranks, samples=samples, offsets=offsets,
        left_out=np.zeros(0, np.int64), packed=True, budgets=budgets, seed=seed, epoch=epoch,
    )


class _Columns(NamedTuple):
    """Columns to level.

    Attributes:
        features: (N, C) of every sample.
        limits: (C,) largest sums of a group.
        sizes: number of columns that are sizes, which come first; the rest are data sets.
        levelled: sizes that are levelled (units or rounded costs).
        cost: (N,) of every sample, in any unit.
    """

    features: np.ndarray
    limits: np.ndarray
    sizes: int
    levelled: SampleSizes
    cost: np.ndarray


def _columns(
    sizes: SampleSizes, budgets: tuple[int, ...], model: CostModel | None,
    measured: MeasuredCosts | None, source_weight: float,
) -> _Columns:
    modalities = len(sizes.names)
    if measured is None:
        features, limits = _features(sizes, budgets, model or even_costs(sizes), source_weight)
        return _Columns(features, limits, modalities + 1, sizes, features[:, modalities])
    levelled, weights = measured.in_units(sizes)
    features, limits = _measured_features(sizes, budgets, levelled, weights, source_weight)
    cost = levelled.values.sum(1).astype(float)
    return _Columns(features, limits, 2 * modalities, levelled, cost)


def _features(
    sizes: SampleSizes, budgets: tuple[int, ...], model: CostModel, source_weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (N, C) columns to level and their (C,) budgets: modalities, cost, data sets. A
    column is scaled so that the mean group has the square root of the column's weight."""
    modalities = len(sizes.names)
    totals, weights = [float(total) for total in sizes.totals], [1.0] * modalities
    cost = model.of_units(sizes.values).sum(1)
    totals.append(float(cost.sum()))
    weights.append(COST_WEIGHT)
    counts = np.bincount(sizes.sources)
    if len(counts) > 1 and source_weight:
        totals += counts.tolist()
        # Weights are proportional to shares, because a rare data set cannot be in every group.
        weights += list(source_weight * len(counts) * counts / len(sizes))
    # The mean group is 1 if there are as many groups as the fullest modality needs.
    fullest = max(total / budget for total, budget in zip(sizes.totals, budgets, strict=True))
    means = np.array(totals) / max(fullest, 1.0)
    scale = np.sqrt(weights) / np.where(means > 0, means, 1.0)
    result = np.zeros((len(sizes), len(totals)))
    np.multiply(sizes.values, scale[:modalities], out=result[:, :modalities])
    result[:, modalities] = cost * scale[modalities]
    if len(totals) > modalities + 1:
        columns = modalities + 1 + sizes.sources
        result[np.arange(len(sizes)), columns] = scale[columns]
    limits = np.full(len(totals), np.inf)
    # Half a unit of tolerance for inexact sums of scaled numbers; it admits no further sample.
    limits[:modalities] = (np.array(budgets) + 0.5) * scale[:modalities]
    return result, limits


def _measured_features(
    sizes: SampleSizes, budgets: tuple[int, ...], levelled: SampleSizes, weights: np.ndarray,
    source_weight: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Build the columns as in :func:`_features`: costs, units for budgets alone, data sets."""
    modalities = len(sizes.names)
    costs, _ = _features(levelled, tuple(b * PARTS for b in budgets), even_costs(levelled),
                         source_weight)  # fmt: skip
    units, limits = _features(sizes, budgets, even_costs(sizes), 0.0)
    result = np.concatenate(
        [
            costs[:, :modalities] * np.sqrt(weights),
            units[:, :modalities] * UNMEASURED,
            costs[:, modalities + 1 :],
        ],
        axis=1,
    )
    free = np.full(costs.shape[1] - modalities - 1, np.inf)
    return result, np.concatenate(
        [np.full(modalities, np.inf), limits[:modalities] * UNMEASURED, free]
    )


def _steps(
    sizes: SampleSizes, columns: _Columns, split: Groups, ranks: int, alike: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Order the groups in steps; return the samples group by group, and the groups' offsets."""
    group_of, groups, large = split
    sums = [
        np.bincount(group_of, column, groups).astype(np.int64)[large:]
        for column in columns.levelled.values.T
    ]
    sums = np.stack(sums, 1)
    similar = _similar_together(sums, columns.levelled.totals, ranks, alike, random)
    cost = np.bincount(group_of, columns.cost, groups)
    by_cost = _of_similar_cost(cost[large:], alike, random)
    levelled = np.column_stack([
        columns.features[:, : columns.sizes], columns.cost * (UNMEASURED / (cost.mean() or 1.0))
    ])
    limits = np.append(columns.limits[: columns.sizes], np.inf)
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for order in (similar, by_cost):
        order = np.concatenate([np.arange(large), large + order])
        # Exchanges within steps are slow and do not lower the largest group, so skip them here.
        if best is not None and _slowest(cost[order], ranks).sum() > best[0] * WORTH_IT:
            break
        samples, offsets = _by_group(group_of, order)
        _spread_sources(samples, offsets, ranks, sizes, random)
        exchange_steps(
            levelled, samples, offsets, ranks, limits, TOLERANCE,
            TRIES if groups <= MANY_GROUPS else TRIES // 2, CANDIDATES, True,
        )
        seconds = float(_slowest(_step_costs(columns.cost, samples, offsets), ranks).sum())
        if best is None or seconds < best[0] * WORTH_IT:
            best = seconds, samples, offsets
    assert best is not None
    _, samples, offsets = best
    slowest = _slowest(_step_costs(columns.cost, samples, offsets), ranks)
    shuffled = random.permuted(np.arange(groups).reshape(-1, ranks), axis=1)
    shuffled = shuffled[_waves(slowest, random)].ravel()
    return _reordered(samples, offsets, shuffled)


def _slowest(cost: np.ndarray, ranks: int) -> np.ndarray:
    return cost.reshape(-1, ranks).max(1)


def _step_costs(cost: np.ndarray, samples: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    cumulative = np.concatenate([[0.0], np.cumsum(cost[samples])])
    return cumulative[offsets[1:]] - cumulative[offsets[:-1]]


def _waves(slowest: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return a (steps,) order of waves that rise and fall in cost, since steps in flight in a
    pipeline wait for the slowest. Each wave has steps of all lengths, drawn at random."""
    steps = len(slowest)
    waves = max(1, steps // WAVE_STEPS)
    ascending = np.lexsort([random.random(steps), slowest])
    rounds = -(-steps // waves)
    # Each wave gets one of every group of steps with similar cost.
    padded = np.concatenate([ascending, np.full(rounds * waves - steps, -1)])
    wave_steps = random.permuted(padded.reshape(rounds, waves), axis=1).T
    halves = []
    for wave in wave_steps:
        members = wave[wave >= 0]
        halves += [members[::2], members[1::2][::-1]]
    return np.roll(np.concatenate(halves), int(random.integers(steps)))


def _of_similar_cost(
    cost: np.ndarray, alike: float, random: np.random.Generator
) -> np.ndarray:
    """Return a (groups,) order by rounded cost."""
    width = max(alike * cost.mean(), 1e-9)
    return np.lexsort([random.random(len(cost)), np.floor(cost / width + random.random())])


def _similar_together(
    sums: np.ndarray, totals: Sequence[int], ranks: int, alike: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Return a (groups,) order in which neighbours are similar in every modality. Keys start with
    the modality with the fewest units. Keys with many values are cut into classes, so that the next
    key matters too; the last key is rounded."""
    groups = len(sums)
    columns = sorted(range(sums.shape[1]), key=lambda column: totals[column])
    classes = max(1, round((groups // ranks) ** (1 / len(columns))))
    keys = []
    for column in columns[:-1]:
        values, ranked = np.unique(sums[:, column], return_inverse=True)
        if len(values) > 4 * classes:
            place_of = np.empty(groups, np.int64)
            place_of[np.argsort(sums[:, column], kind="stable")] = np.arange(groups)
            ranked = place_of * classes // groups
        keys.append(ranked)
    last = sums[:, columns[-1]]
    width = max(alike * totals[columns[-1]] / groups, 1.0)
    keys.append(np.floor(last / width + random.random()) if width > 1 else last)
    return np.lexsort([random.random(groups), *keys[::-1]])


def _by_group(group_of: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples group by group, in the given order of groups, and the groups' offsets."""
    slot_of = np.empty(len(order), np.int64)
    slot_of[order] = np.arange(len(order))
    sample_slots = slot_of[group_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sample_slots, minlength=len(order)))])
    return np.argsort(sample_slots, kind="stable"), offsets


def _spread_sources(
    samples: np.ndarray, offsets: np.ndarray, ranks: int, sizes: SampleSizes,
    random: np.random.Generator,
) -> None:
    """Exchange samples of equal sizes between steps, in place, for equal mixes of data sets."""
    if not sizes.sources.any():
        return
    key = np.zeros(len(sizes), np.int64)
    for column in sizes.values.T:
        key = key * (int(column.max()) + 1) + column
        # Renumber keys where needed, so that they stay small for any number of modalities.
        if int(key.max()) >= 1 << 31:
            key = np.unique(key, return_inverse=True)[1]
    step_of = np.repeat(np.arange(len(offsets) - 1) // ranks, np.diff(offsets))
    slots = random.permutation(len(samples))
    slots = slots[np.argsort(key[samples[slots]], kind="stable")]
    cells = np.flatnonzero(np.diff(key[samples[slots]], prepend=-1, append=-1))
    spread_sources(
        samples, step_of, slots, cells, sizes.sources, int(sizes.sources.max()) + 1
    )


def _reordered(
    samples: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    counts = np.diff(offsets)[order]
    stops = np.cumsum(counts)
    starts = np.repeat(offsets[:-1][order] - (stops - counts), counts)
    return samples[starts + np.arange(len(samples))], np.concatenate([[0], stops])


def order_for_shares(
    samples: np.ndarray, offsets: np.ndarray, sizes: SampleSizes, measured: MeasuredCosts
) -> np.ndarray:
    """Return the samples of each group in an order in which replicas' shares take about equally
    long.

    Per group, this lowers the sum over modules and replicas of squared seconds (on a replica of
    mean speed) times the relative seconds of the replica, by placing samples one by one, largest
    first, and then exchanging them. For a single module the sum is least if all replicas take
    equally long.

    Args:
        measured: costs of units, and relative seconds of replicas that split microbatches.
    """
    names = sorted(measured.shared & set(sizes.names))
    counts = np.array([len(measured.replicas[name]) for name in names], np.int64)
    if not names:
        return samples
    seconds = measured.of_samples(sizes.names, sizes.values)
    seconds = np.ascontiguousarray(seconds[:, [sizes.column(name) for name in names]])
    factors = np.ones((len(names), int(counts.max())))
    for row, name in enumerate(names):
        factors[row, : counts[row]] = measured.replicas[name]
    return _ordered(samples, offsets, seconds, counts, factors)


@njit(cache=True)
def _ordered(samples, offsets, seconds, counts, factors):
    """Return the (len(samples),) samples in their new order. ``seconds`` is (N, C) of every sample
    in modules whose replicas split microbatches, ``counts`` (C,) the number of replicas, and
    ``factors`` (C, most replicas) their relative seconds."""
    result = samples.copy()
    columns = counts.shape[0]
    for g in range(offsets.shape[0] - 1):
        group_samples = samples[offsets[g] : offsets[g + 1]]
        n = group_samples.shape[0]
        copy_of = np.empty((n, columns), np.int64)  # by position
        for position in range(n):
            for c in range(columns):
                copy_of[position, c] = ((position + 1) * counts[c] - 1) // n
        loads = np.zeros(factors.shape)
        sample_at = _placed(seconds[group_samples], copy_of, loads, factors)
        for _ in range(ROUNDS):
            if not _exchanged(seconds[group_samples], copy_of, loads, factors, sample_at):
                break
        for position in range(n):
            result[offsets[g] + position] = group_samples[sample_at[position]]
    return result


@njit(cache=True)
def _placed(seconds, copy_of, loads, factors):
    """Return the (n,) sample at every place: largest first, each where the sum grows least."""
    n, columns = seconds.shape
    sample_at = np.full(n, -1, np.int64)
    total = np.zeros(n)
    for i in range(n):
        total[i] = -seconds[i].sum()
    for i in np.argsort(total, kind="mergesort"):
        target, best = -1, np.inf
        for position in range(n):
            if sample_at[position] >= 0:
                continue
            score = 0.0
            for c in range(columns):
                k, s = copy_of[position, c], seconds[i, c]
                score += factors[c, k] * s * (loads[c, k] + 0.5 * s)
            if score < best:
                target, best = position, score
        sample_at[target] = i
        for c in range(columns):
            loads[c, copy_of[target, c]] += seconds[i, c]
    return sample_at


@njit(cache=True)
def _exchanged(seconds, copy_of, loads, factors, sample_at):
    """Exchange the sample of every place for the best other one; return False if all stay."""
    n, columns = seconds.shape
    least = -1e-9 * (factors * loads**2).sum()
    changed = False
    for a in range(n):
        best, target = least, -1
        for b in range(n):
            change = 0.0
            for c in range(columns):
                first, second = copy_of[a, c], copy_of[b, c]
                if first != second:
                    s = seconds[sample_at[b], c] - seconds[sample_at[a], c]
                    change += factors[c, first] * s * (2.0 * loads[c, first] + s)
                    change -= factors[c, second] * s * (2.0 * loads[c, second] - s)
            if change < best:
                best, target = change, b
        if target >= 0:
            changed = True
            for c in range(columns):
                s = seconds[sample_at[target], c] - seconds[sample_at[a], c]
                loads[c, copy_of[a, c]] += s
                loads[c, copy_of[target, c]] -= s
            sample_at[a], sample_at[target] = sample_at[target], sample_at[a]
    return changed
