"""Budgets per group and modality, and lower bounds of the number of groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.minibatch.levelling import level
from raymm.scheduler.minibatch.problem import SampleSizes, checked_budgets

# Room above the mean group, in the modalities other than the one with the fewest units.
SLACK = Fraction(104, 100)
# Larger budgets are not searched for, as their groups fill up to a percent or two anyway.
COARSE = 64
# Range of the search relative to the wanted budget, size of the trial, sampling factor of the
# trial, and excess of groups over the bound that ends a trial.
REACH = (0.9, 1.15)
TRIAL_SAMPLES = 1024
TRIAL_EVERY = 32
TRIAL_EXCESS = 0.15


def least_groups(sizes: SampleSizes, budgets: Sequence[int]) -> int:
    """Return a lower bound of the number of groups within the budgets.

    Per modality this is the larger of volume over budget and Martello and Toth's bound (L2, 1990)
    for every threshold t up to half the budget: samples above ``budget - t`` share a group with no
    sample of at least t, and samples above half the budget not with each other. Raises
    ``PlanError`` as in :func:`raymm.scheduler.minibatch.problem.checked_budgets`.
    """
    budgets = checked_budgets(sizes, budgets)
    return max(
        [_martello_toth(sizes.values[:, column], budget) for column, budget in enumerate(budgets)]
    )


def _martello_toth(values: np.ndarray, budget: int) -> int:
    values = np.sort(values)
    cumulative = np.concatenate([[0], np.cumsum(values)])
    thresholds = np.unique(np.concatenate([[0], values[2 * values <= budget]]))
    above = np.searchsorted(values, budget - thresholds, side="right")
    half = np.searchsorted(values, budget // 2, side="right")
    start = np.searchsorted(values, thresholds, side="left")
    # Each sample in (budget / 2, budget - t] has a separate group, with room for smaller ones.
    between = np.maximum(above - half, 0)
    room = between * budget - np.maximum(cumulative[above] - cumulative[half], 0)
    small = np.maximum(cumulative[np.minimum(half, above)] - cumulative[start], 0)
    extra = -(-np.maximum(small - room, 0) // budget)
    return int((len(values) - above + between + extra).max())


def suggest_budgets(sizes: SampleSizes, samples_per_group: float = 4.0) -> tuple[int, ...]:
    """Return budgets for groups of about ``samples_per_group`` samples that all modalities fill up
    together. Raise ``PlanError`` for less than one sample per group, or no sample.

    As in OmniBal §5.1, one modality is given and the others follow from the ratios of the totals.
    The given modality has the fewest units per group. Its budget is the one near the wanted one
    that samples fill best: images of 5 tiles fill 10 or 15, but not 12. The others get
    :data:`SLACK`, without which hardly any group would be full.
    """
    if not samples_per_group >= 1 or not len(sizes):
        raise PlanError(
            f"samples_per_group must be at least 1 and sizes must not be empty, got "
            f"{samples_per_group} and {len(sizes)} samples"
        )
    used = [column for column, total in enumerate(sizes.totals) if total]
    if not used:
        return (1,) * len(sizes.names)
    modality = min(used, key=lambda column: sizes.totals[column])
    target = sizes.totals[modality] * samples_per_group / len(sizes)
    if target > COARSE:
        return _budgets(sizes, modality, math.ceil(target))
    # Evenly spaced samples, in the order of sizes, represent all of them.
    indices = np.random.default_rng(0).integers(0, len(sizes), TRIAL_EVERY * TRIAL_SAMPLES)
    drawn = sizes.values[indices] if len(sizes) > len(indices) else sizes.values
    quantiles = np.linspace(0, len(drawn) - 1, TRIAL_SAMPLES).astype(int)
    trial = drawn[np.lexsort(drawn.T)[quantiles]]
    if not trial[:, modality].any():
        return _budgets(sizes, modality, math.ceil(target))
    low, high = (max(1, math.ceil(reach * target)) for reach in REACH)
    candidates = {_budgets(sizes, modality, units) for units in range(low, high + 1)}
    return min(
        candidates,
        key=lambda budgets: (
            # Rounded to 2%, because filling slightly better is not worth a larger distance.
            50 * _groups_needed(trial, budgets) * budgets[modality] // trial[:, modality].sum(),
            abs(budgets[modality] - target), budgets,
        ),
    )


def _budgets(sizes: SampleSizes, modality: int, units: int) -> tuple[int, ...]:
    """Return the budgets for ``units`` of one modality, at least the largest sample."""
    largest = sizes.values.max(0)
    units = max(units, int(largest[modality]))
    result = []
    for column, total in enumerate(sizes.totals):
        share = Fraction(total, sizes.totals[modality]) * units
        target = units if column == modality else math.ceil(share * SLACK)
        result.append(max(1, target, int(largest[column])))
    return tuple(result)


def _groups_needed(values: np.ndarray, budgets: tuple[int, ...]) -> int:
    """Return the number of groups into which levelling fits the samples. The search ends at about
    ``1 + TRIAL_EXCESS`` times the lower bound, where they may not fit yet."""
    limits = np.array(budgets, np.float64)
    scaled = values / limits
    order = np.argsort(-scaled.sum(1), kind="stable")
    least = max(1, math.ceil(scaled.sum(0).max()))
    most = math.ceil(least * (1 + TRIAL_EXCESS))
    groups, group_of = least, np.empty(len(values), np.int64)
    no_extra = np.zeros((0, len(limits)))
    while groups < most and level(scaled, order, 1.0 + 0.5 / limits, groups, group_of, no_extra):
        groups += max(1, least // 100)
    return groups
