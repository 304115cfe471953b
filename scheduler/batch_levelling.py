"""Samples into groups of equal size in every modality at once, compiled.

Sizes are vectors: one column per modality, scaled so that the mean group is 1 in each. A sample
goes where the sum of squares over groups and columns grows least, the largest samples first
(LPT, Graham 1969, for vectors); then samples are exchanged between the groups of one step.
Everything counts comparisons instead of seconds, so that every process that plans for itself
plans the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def level(sizes, order, budgets, groups, group_of):
    """Deal samples to groups so that all groups become equally large in every column.

    Args:
        sizes: (N, C) float64, none negative.
        order: (n,) int64, the samples to deal, largest first.
        budgets: (C,) float64, what no group may exceed in each column; infinite for no budget.
        groups: how many.
        group_of: (N,) int64, written for the samples in ``order``: their group, or -1 for a
            sample that no group has room for.

    Returns:
        How many samples found no group.
    """
    columns = sizes.shape[1]
    loads = np.zeros((columns, groups))
    scores = np.empty(groups)
    spilled = 0
    for sample in order:
        scores[:] = 0.0
        for c in range(columns):
            size = sizes[sample, c]
            if size > 0.0:
                row = loads[c]
                for g in range(groups):
                    scores[g] += size * row[g]
        found = -1
        best = np.inf
        for g in range(groups):
            if scores[g] < best:
                fits = True
                for c in range(columns):
                    if loads[c, g] + sizes[sample, c] > budgets[c]:
                        fits = False
                        break
                if fits:
                    best, found = scores[g], g
        group_of[sample] = found
        if found < 0:
            spilled += 1
        else:
            for c in range(columns):
                loads[c, found] += sizes[sample, c]
    return spilled


@njit(cache=True)
def exchange_steps(sizes, samples, offsets, ranks, budgets, tolerance, swaps):
    """Level the groups of every step among themselves, in place.

    Groups ``step * ranks`` to ``(step + 1) * ranks`` are one step. The group that is furthest
    above the step's mean in some column exchanges a sample for one of another group, where that
    lowers the sum of squared deviations most, until nothing lowers it. Numbers of samples per
    group stay.

    Args:
        sizes: (N, C) float64.
        samples: (n,) int64, samples of all groups, one group after the other; changed.
        offsets: (groups + 1,) int64, where groups begin.
        ranks: groups per step.
        budgets: (C,) float64.
        tolerance: a group this far above the mean is level enough; above 0.
        swaps: at most this many tries per step.

    Returns:
        (groups, C) float64, the sizes of the groups.
    """
    columns = sizes.shape[1]
    groups = offsets.shape[0] - 1
    loads = np.zeros((groups, columns))
    for g in range(groups):
        for i in range(offsets[g], offsets[g + 1]):
            for c in range(columns):
                loads[g, c] += sizes[samples[i], c]
    stuck = np.empty(ranks, np.bool_)
    for first in range(0, groups - ranks + 1, ranks):
        stuck[:] = False
        for _ in range(swaps):
            heavy = _furthest_above(loads, first, ranks, tolerance, stuck)
            if heavy < 0:
                break
            other, i, j = _best_swap(sizes, samples, offsets, loads, budgets, first, ranks, heavy)
            if other < 0:
                stuck[heavy - first] = True
                continue
            a, b = samples[i], samples[j]
            samples[i], samples[j] = b, a
            for c in range(columns):
                loads[heavy, c] += sizes[b, c] - sizes[a, c]
                loads[other, c] += sizes[a, c] - sizes[b, c]
            stuck[heavy - first] = False
            stuck[other - first] = False
    return loads


@njit(cache=True)
def _furthest_above(loads, first, ranks, tolerance, stuck):
    """The group of a step that is furthest above the mean in one column, of those that are not
    stuck; -1 if none is above by more than the tolerance."""
    found, largest = -1, tolerance
    for c in range(loads.shape[1]):
        mean = 0.0
        for g in range(first, first + ranks):
            mean += loads[g, c]
        mean /= ranks
        for g in range(first, first + ranks):
            if not stuck[g - first] and loads[g, c] - mean > largest:
                found, largest = g, loads[g, c] - mean
    return found


@njit(cache=True)
def _best_swap(sizes, samples, offsets, loads, budgets, first, ranks, heavy):
    """The exchange of one sample of ``heavy`` that lowers the sum of squares most.

    Returns:
        The other group and the places of both samples; -1 for the group if nothing helps.
    """
    columns = sizes.shape[1]
    found, best_i, best_j, best = -1, 0, 0, -1e-12
    for other in range(first, first + ranks):
        if other == heavy:
            continue
        for i in range(offsets[heavy], offsets[heavy + 1]):
            for j in range(offsets[other], offsets[other + 1]):
                change, fits = 0.0, True
                for c in range(columns):
                    d = sizes[samples[j], c] - sizes[samples[i], c]
                    change += d * (loads[heavy, c] - loads[other, c] + d)
                    if (
                        loads[heavy, c] + d > budgets[c] and d > 0.0
                    ) or (loads[other, c] - d > budgets[c] and d < 0.0):
                        fits = False
                        break
                if fits and change < best:
                    found, best_i, best_j, best = other, i, j, change
    return found, best_i, best_j
