"""Budgets of a group per modality, and how many groups they need at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from raymm.scheduler.minibatch import MiniBatchError, SampleSizes, checked_budgets

# Room above the mean group in the modalities that are not counted in a few large units.
SLACK = Fraction(104, 100)


def least_groups(sizes: SampleSizes, budgets: Sequence[int]) -> int:
    """No partition within the budgets has fewer groups.

    Per modality the larger of volume over budget and, for every threshold t up to half the
    budget, Martello and Toth's bound (L2, 1990): samples above ``budget - t`` share with none of
    at least t, those above half the budget not with each other.

    Raises:
        MiniBatchError: see :func:`raymm.scheduler.minibatch.checked_budgets`.
    """
    budgets = checked_budgets(sizes, budgets)
    return max(
        [_martello_toth(sizes.values[:, column], budget) for column, budget in enumerate(budgets)]
    )


def _martello_toth(values: np.ndarray, budget: int) -> int:
    values = np.sort(values)
    before = np.concatenate([[0], np.cumsum(values)])
    thresholds = np.unique(np.concatenate([[0], values[2 * values <= budget]]))
    above = np.searchsorted(values, budget - thresholds, side="right")
    half = np.searchsorted(values, budget // 2, side="right")
    start = np.searchsorted(values, thresholds, side="left")
    # Of samples in (budget / 2, budget - t] each has its own group, with room for smaller ones.
    between = np.maximum(above - half, 0)
    room = between * budget - np.maximum(before[above] - before[half], 0)
    small = np.maximum(before[np.minimum(half, above)] - before[start], 0)
    more = -(-np.maximum(small - room, 0) // budget)
    return int((len(values) - above + between + more).max())


def suggest_budgets(sizes: SampleSizes, samples_per_group: float = 4.0) -> tuple[int, ...]:
    """Budgets for groups of about so many samples that all modalities fill up together.

    As OmniBal §5.1, one modality is given and the others follow from the ratios of the totals.
    Given is the one with the fewest units per group, because a group of 9.3 tiles has 9 or 10;
    the others get :data:`SLACK`, without which hardly any group would fill up both.

    Raises:
        MiniBatchError: fewer than one sample per group, or no sample.
    """
    if samples_per_group < 1 or not len(sizes):
        raise MiniBatchError(
            f"samples_per_group must be at least 1 and samples present, got {samples_per_group} "
            f"and {len(sizes)} samples"
        )
    groups = len(sizes) / samples_per_group
    used = [column for column, total in enumerate(sizes.totals) if total]
    largest = sizes.values.max(0)
    budgets = [1] * len(sizes.names)
    if not used:
        return tuple(budgets)
    given = min(used, key=lambda column: sizes.totals[column])
    budgets[given] = max(math.ceil(sizes.totals[given] / groups), int(largest[given]))
    for column in used:
        if column != given:
            share = Fraction(sizes.totals[column], sizes.totals[given]) * budgets[given]
            budgets[column] = max(math.ceil(share * SLACK), int(largest[column]))
    return tuple(budgets)
