"""Mini-batches that are equally large in every modality, in all groups of every step.

OmniBal's ISF draws groups until they happen to be full and drops what is left. Here the number
of steps is fixed first and the samples are split to exactly that many groups:

1. The samples, sorted by size, are dealt at random to *pools* of some steps each, so that every
   pool has the same distribution of sizes and, in every epoch, other samples.
2. A pool's samples are levelled over its groups (:mod:`raymm.scheduler.minibatch.levelling`): equal
   in every modality, in cost, and in how much comes from every data set. Samples that are larger
   than the mean group share steps, whose other groups are filled up to them, if ranks wait less
   then. What fits no group continues to the next pool; the last one gets more steps if it must.
3. All groups are sorted by size and cut into steps of groups that are nearly the same. Samples
   of equal size are exchanged between steps so that each has its share of every data set, others
   within a step for what is left of the difference.
4. The ranks within each step are shuffled, and steps follow one another in waves, up and down in
   cost: those that are in flight in a pipeline at a time take about as long.

With measured costs (:mod:`raymm.scheduler.minibatch.measured_costs`) seconds of every module are
levelled instead of units, which then only count for budgets; and where replicas of a module differ
in speed, the samples of every step are dealt anew over its groups in the end. Where replicas share
every group by samples, each group's are put in an order for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
from raymm.scheduler.minibatch.sample_order import order_for_shares

# Weights of cost and of data sets beside the modalities, each of which has 1.
COST_WEIGHT = 0.3
SOURCE_WEIGHT = 0.3
# A step whose groups are above their mean by less, relative to the mean group, is left alone.
TOLERANCE = 2e-4
TRIES = 200
# Groups of a step that are looked at for an exchange.
CANDIDATES = 8
# Scale of units beside measured costs: they count for budgets, and for nearly nothing else.
UNMEASURED = 1e-3
# What other steps must save to be taken: by cost alone they are less alike in each modality.
WORTH_IT = 0.998
# Steps between two of the longest.
WAVE_STEPS = 64
# Size differences below this do not keep groups apart, so that steps mix several data sets.
ALIKE = 0.01


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
    """Plan an epoch in which every sample is taken exactly once.

    Args:
        sizes: of all samples.
        ranks: data-parallel ranks.
        budgets: units per modality that no group may exceed. Default: those of
            :func:`raymm.scheduler.minibatch.budgets.suggest_budgets` for ``samples_per_group``.
        samples_per_group: about how many samples a group should have, without budgets.
        model: what samples cost; default: every modality costs the same over the whole data.
        measured: what units cost, instead of ``model``. Where replicas of a module are not equally
            fast, group g of a step is for copy g mod n, and those of fast ones may be larger
            than the others, but not than ``budgets`` that are given.
        source_weight: how much the groups' mix of data sets counts beside their sizes; 0 for
            not at all.
        alike: groups whose sizes differ by less than this, relative to the mean group, are
            dealt to steps at random: 0 for the best balance; at 1 steps mix groups of all sizes.
            Default: :data:`ALIKE` for several data sets, 0 for one, which has nothing to mix.
        seed, epoch: the same numbers make the same plan on every machine; every epoch differs.

    Returns:
        A packed plan without samples left out. If there are fewer samples than groups (tiny
        data whose samples need a group each) some groups are empty.

    Raises:
        PlanError: fewer samples than ranks, a sample above a budget, options out of range.
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
    """What is levelled.

    Attributes:
        features: (N, C) of every sample.
        limits: (C,) sums that no group may exceed.
        sizes: how many of the columns, the first ones, are sizes; the rest are data sets.
        levelled: sizes of the samples as far as they are levelled.
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
    """(N, C) what is levelled, each column with its share of the total times the root of its
    weight, and (C,) budgets in the same unit. First the modalities, then cost, then sources."""
    modalities = len(sizes.names)
    totals, weights = [float(total) for total in sizes.totals], [1.0] * modalities
    cost = model.of_units(sizes.values).sum(1)
    totals.append(float(cost.sum()))
    weights.append(COST_WEIGHT)
    counts = np.bincount(sizes.sources)
    if len(counts) > 1 and source_weight:
        totals += counts.tolist()
        # A data set counts by its share: one that is rare cannot be in every group.
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
    # Sums of scaled numbers are not exact: half a unit more lets in nothing that is too much.
    limits[:modalities] = (np.array(budgets) + 0.5) * scale[:modalities]
    return result, limits


def _measured_features(
    sizes: SampleSizes, budgets: tuple[int, ...], levelled: SampleSizes, weights: np.ndarray,
    source_weight: float,
) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`_features`: first costs, then units for their budgets alone, then sources."""
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
    """Samples group after group, groups of a step after one another, and where groups begin."""
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
        columns.features[:, : columns.sizes], columns.cost * (UNMEASURED / cost.mean())
    ])
    limits = np.append(columns.limits[: columns.sizes], np.inf)
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for order in (similar, by_cost):
        order = np.concatenate([np.arange(large), large + order])
        # Exchanges within steps take time, and do not make the largest group of any smaller.
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
    """(steps,) the largest cost of a group, of (groups,) costs step after step."""
    return cost.reshape(-1, ranks).max(1)


def _step_costs(cost: np.ndarray, samples: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """(groups,) of samples group after group."""
    before = np.concatenate([[0.0], np.cumsum(cost[samples])])
    return before[offsets[1:]] - before[offsets[:-1]]


def _waves(slowest: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """(steps,) an order in which steps that follow one another take about as long, as those in
    flight in a pipeline wait for the slowest: waves up and down, each with steps of all lengths
    drawn at random, from anywhere in a wave on."""
    steps = len(slowest)
    waves = max(1, steps // WAVE_STEPS)
    ascending = np.lexsort([random.random(steps), slowest])
    rounds = -(-steps // waves)
    # Of every so many steps alike each wave gets one.
    padded = np.concatenate([ascending, np.full(rounds * waves - steps, -1)])
    of_waves = random.permuted(padded.reshape(rounds, waves), axis=1).T
    parts = []
    for wave in of_waves:
        own = wave[wave >= 0]
        parts += [own[::2], own[1::2][::-1]]
    return np.roll(np.concatenate(parts), int(random.integers(steps)))


def _of_similar_cost(
    cost: np.ndarray, alike: float, random: np.random.Generator
) -> np.ndarray:
    """(groups,) an order by what groups cost, to within ``alike`` of the mean."""
    width = max(alike * cost.mean(), 1e-9)
    return np.lexsort([random.random(len(cost)), np.floor(cost / width + random.random())])


def _similar_together(
    sums: np.ndarray, totals: Sequence[int], ranks: int, alike: float,
    random: np.random.Generator,
) -> np.ndarray:
    """(groups,) an order in which neighbours are similar in every modality.

    Sorted by the modality with the fewest units first. One with more different values than
    there are steps to tell them apart is cut into classes, so that the next one counts as well.
    Within a class groups are sorted by the last one, to within ``alike`` of the mean group.
    """
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
    """Samples group after group, groups in the given order, and where groups begin."""
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    of_sample = place_of[group_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of_sample, minlength=len(order)))])
    return np.argsort(of_sample, kind="stable"), offsets


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
        # Numbered anew where needed, so that keys stay small however many modalities there are.
        if int(key.max()) >= 1 << 31:
            key = np.unique(key, return_inverse=True)[1]
    step_of = np.repeat(np.arange(len(offsets) - 1) // ranks, np.diff(offsets))
    places = random.permutation(len(samples))
    places = places[np.argsort(key[samples[places]], kind="stable")]
    cells = np.flatnonzero(np.diff(key[samples[places]], prepend=-1, append=-1))
    spread_sources(
        samples, step_of, places, cells, sizes.sources, int(sizes.sources.max()) + 1
    )


def _reordered(
    samples: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and offsets with the groups in another order."""
    counts = np.diff(offsets)[order]
    stops = np.cumsum(counts)
    starts = np.repeat(offsets[:-1][order] - (stops - counts), counts)
    return samples[starts + np.arange(len(samples))], np.concatenate([[0], stops])
