"""Compiled assignment of samples to groups of equal size in every modality at once.

Sizes are vectors with one column per modality, scaled so that the mean group is 1 in each. Samples
are assigned in descending order of size to the group where the sum of squares over groups and
columns grows least (LPT, Graham 1969, for vectors). Then samples are exchanged between the groups
of a step. Limits count comparisons instead of seconds, so that processes that plan independently
get the same plan.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MOST_CANDIDATES = 8


@njit(cache=True)
def level(sizes, order, budgets, groups, group_of, extra):
    """Assign samples to groups so that all groups become equally large in every column.

    Args:
        sizes: (N, C) float64, not negative.
        order: (n,) int64, samples to assign, largest first.
        budgets: (C,) float64, largest sum of a group in each column; infinite for no budget.
        group_of: (N,) int64, written for the samples in ``order``: their group, or -1 for a sample
            that no group has room for.
        extra: (H, C) float64. The first H samples of ``order`` go to the first H groups, one to
            each, and these groups become larger than the others by ``extra``.

    Returns:
        Number of samples without a group.
    """
    columns = sizes.shape[1]
    loads = np.zeros((columns, groups))
    above = np.zeros((columns, groups))  # loads minus the intended excess of a group
    for g in range(extra.shape[0]):
        for c in range(columns):
            above[c, g] = -extra[g, c]
    scores = np.empty(groups)
    spilled = 0
    for index in range(order.shape[0]):
        sample = order[index]
        chosen = -1
        best = np.inf
        if index < extra.shape[0]:
            chosen = index
        else:
            scores[:] = 0.0
            for c in range(columns):
                size = sizes[sample, c]
                if size > 0.0:
                    row = above[c]
                    for g in range(groups):
                        scores[g] += size * row[g]
        for g in range(groups if chosen < 0 else 0):
            if scores[g] < best:
                fits = True
                for c in range(columns):
                    if loads[c, g] + sizes[sample, c] > budgets[c]:
                        fits = False
                        break
                if fits:
                    best, chosen = scores[g], g
        group_of[sample] = chosen
        if chosen < 0:
            spilled += 1
        else:
            for c in range(columns):
                loads[c, chosen] += sizes[sample, c]
                above[c, chosen] += sizes[sample, c]
    return spilled


@njit(cache=True)
def fill(sizes, order, budgets, groups, group_of, first):
    """Assign samples to the fullest groups that have room (best fit decreasing), and return the
    number of samples without a group. This needs fewer groups than :func:`level`, but they are less
    equal. Arguments are those of :func:`level`; the ``first`` samples go to the first groups, one
    to each."""
    columns = sizes.shape[1]
    room = np.empty((groups, columns))
    for c in range(columns):
        room[:, c] = budgets[c]
    spilled = 0
    for index in range(order.shape[0]):
        sample = order[index]
        group = index if index < first else _fullest_with_room(room, sizes[sample], budgets, -1)
        group_of[sample] = group
        if group < 0:
            spilled += 1
            continue
        for c in range(columns):
            room[group, c] -= sizes[sample, c]
    return spilled


@njit(cache=True)
def make_room(sizes, order, budgets, groups, group_of, first):
    """Find groups for samples that :func:`level` left without one, by moving another sample to a
    third group, which it fills up most. Return the number of samples that still have none.
    Arguments are those of :func:`level`; the ``first`` samples of ``order`` stay in their
    groups."""
    columns = sizes.shape[1]
    room = np.empty((groups, columns))
    for c in range(columns):
        room[:, c] = budgets[c]
    for sample in order:
        if group_of[sample] >= 0:
            for c in range(columns):
                room[group_of[sample], c] -= sizes[sample, c]
    spilled = 0
    # Samples that no other group has room for. The flag is reset when a group with enough room
    # appears.
    stays = np.zeros(len(order), np.bool_)
    for sample in order:
        if group_of[sample] >= 0:
            continue
        has_group = False
        for index in range(len(order) - 1, first - 1, -1):
            moved = order[index]
            group = group_of[moved]
            if group < 0 or stays[index]:
                continue
            if not _has_room(room[group], sizes[sample], sizes[moved]):
                continue
            target = _fullest_with_room(room, sizes[moved], budgets, group)
            if target < 0:
                stays[index] = True
                continue
            for c in range(columns):
                room[group, c] += sizes[moved, c] - sizes[sample, c]
                room[target, c] -= sizes[moved, c]
            group_of[moved], group_of[sample] = target, group
            for slot in range(len(order)):
                third = order[slot]
                if stays[slot] and group_of[third] != group:
                    stays[slot] = not _fits(room[group], sizes[third])
            has_group = True
            break
        if not has_group:
            spilled += 1
    return spilled


@njit(cache=True)
def _fits(room, size):
    for c in range(len(room)):
        if room[c] < size[c]:
            return False
    return True


@njit(cache=True)
def _has_room(room, size, leaves):
    for c in range(len(room)):
        if room[c] + leaves[c] < size[c]:
            return False
    return True


@njit(cache=True)
def _fullest_with_room(room, size, budgets, but):
    """Return the group with the least room that a sample fits in, or -1."""
    chosen, least = -1, np.inf
    for group in range(len(room)):
        if group == but:
            continue
        total, fits = 0.0, True
        for c in range(len(size)):
            if room[group, c] < size[c]:
                fits = False
                break
            if budgets[c] < np.inf:
                total += room[group, c] / budgets[c]
        if fits and total < least:
            chosen, least = group, total
    return chosen


@njit(cache=True)
def exchange_steps(sizes, samples, offsets, ranks, budgets, tolerance, tries, candidates, capped):
    """Level the groups of every step by exchanges, in place.

    Groups ``step * ranks`` to ``(step + 1) * ranks`` are one step. The group that is furthest above
    the step's mean in some column exchanges a sample with a group that has less, where this lowers
    the sum of squared deviations most. A group without such an exchange is skipped until it takes
    part in another one. Numbers of samples per group do not change.

    Args:
        sizes: (N, C) float64.
        samples: (n,) int64, samples of all groups, group by group; changed in place.
        offsets: (groups + 1,) int64, offsets of groups.
        budgets: (C,) float64.
        tolerance: distance above the mean that is accepted; above 0.
        tries: most exchanges per step.
        candidates: number of groups considered for an exchange, those with least in the column. If
            none of them helps, :data:`MOST_CANDIDATES` times as many are considered.
        capped: True if the largest group of a step may not grow in the last column.
    """
    columns = sizes.shape[1]
    groups = offsets.shape[0] - 1
    longest = 0
    for first in range(0, groups - ranks + 1, ranks):
        longest = max(longest, offsets[first + ranks] - offsets[first])
    step_sizes = np.empty((longest, columns))
    starts = np.empty(ranks + 1, np.int64)
    loads = np.empty((ranks, columns))
    stuck = np.empty(ranks, np.bool_)
    limits = budgets.copy()
    for first in range(0, groups - ranks + 1, ranks):
        begin = offsets[first]
        starts[:] = offsets[first : first + ranks + 1] - begin
        loads[:] = 0.0
        for g in range(ranks):
            for i in range(starts[g], starts[g + 1]):
                for c in range(columns):
                    step_sizes[i, c] = sizes[samples[begin + i], c]
                    loads[g, c] += step_sizes[i, c]
        stuck[:] = False
        if capped:
            limits[columns - 1] = min(budgets[columns - 1], loads[:, columns - 1].max())
        for _ in range(tries):
            heavy, column = _furthest_above(loads, tolerance, stuck)
            if heavy < 0:
                break
            light, i, j = _best_swap(
                step_sizes, starts, loads, limits, heavy, column, candidates
            )
            if light < 0:
                stuck[heavy] = True
                continue
            samples[begin + i], samples[begin + j] = samples[begin + j], samples[begin + i]
            for c in range(columns):
                d = step_sizes[j, c] - step_sizes[i, c]
                loads[heavy, c] += d
                loads[light, c] -= d
                step_sizes[i, c] += d
                step_sizes[j, c] -= d
            stuck[heavy] = False
            stuck[light] = False


@njit(cache=True)
def _furthest_above(loads, tolerance, stuck):
    """Return the unstuck group that is furthest above the mean in a column, and the column; -1 if
    all are within the tolerance."""
    chosen, column, largest = -1, 0, tolerance
    for c in range(loads.shape[1]):
        mean = loads[:, c].mean()
        for g in range(loads.shape[0]):
            if not stuck[g] and loads[g, c] - mean > largest:
                chosen, column, largest = g, c, loads[g, c] - mean
    return chosen, column


@njit(cache=True)
def _best_swap(mine, starts, loads, budgets, heavy, column, candidates):
    """Return the exchange of one sample of ``heavy`` that lowers the sum of squares most: the other
    group (-1 for none) and the places of both samples."""
    columns = mine.shape[1]
    chosen, best_i, best_j, best = -1, 0, 0, -1e-12
    compared = 0
    for light in np.argsort(loads[:, column], kind="mergesort"):
        if loads[light, column] >= loads[heavy, column]:
            break
        compared += 1
        for i in range(starts[heavy], starts[heavy + 1]):
            for j in range(starts[light], starts[light + 1]):
                if mine[j, column] >= mine[i, column]:
                    continue
                change, fits = 0.0, True
                for c in range(columns):
                    d = mine[j, c] - mine[i, c]
                    change += d * (loads[heavy, c] - loads[light, c] + d)
                    above = loads[heavy, c] if d > 0.0 else loads[light, c]
                    fits = fits and above + abs(d) <= budgets[c]
                if fits and change < best:
                    chosen, best_i, best_j, best = light, i, j, change
        if compared >= candidates and (chosen >= 0 or compared >= MOST_CANDIDATES * candidates):
            break
    return chosen, best_i, best_j


@njit(cache=True)
def spread_sources(samples, step_of, places, cells, sources, kinds):
    """Exchange samples of equal size so that every step has its share of every data set, in place.

    Args:
        samples: (n,) int64, samples of all groups, group by group; changed in place.
        step_of: (n,) int64, step of every place in ``samples``.
        places: (n,) int64, places in ``samples``, grouped by the size of their samples.
        cells: (cells + 1,) int64, offsets in ``places`` where another size begins.
        sources: (N,) int64, data set of every sample.
    """
    n = samples.shape[0]
    steps = step_of.max() + 1
    share = np.zeros(kinds)
    lacks = np.zeros((steps, kinds))  # number of samples of a data set that a step is short of
    for i in range(n):
        kind = sources[samples[i]]
        share[kind] += 1.0 / n
        lacks[step_of[i], kind] -= 1.0
    for i in range(n):
        for k in range(kinds):
            lacks[step_of[i], k] += share[k]
    counts = np.empty(kinds + 1, np.int64)
    heads = np.empty(kinds, np.int64)
    ordered = np.empty(n, np.int64)
    for cell in range(cells.shape[0] - 1):
        low, high = cells[cell], cells[cell + 1]
        counts[:] = 0
        for i in range(low, high):
            counts[sources[samples[places[i]]] + 1] += 1
        if counts[1:].max() == high - low:
            continue
        # Sort the samples of the cell by data set; heads are the next ones to assign.
        for k in range(kinds):
            counts[k + 1] += counts[k]
            heads[k] = counts[k]
        for i in range(low, high):
            kind = sources[samples[places[i]]]
            ordered[heads[kind]] = samples[places[i]]
            heads[kind] += 1
            lacks[step_of[places[i]], kind] += 1.0
        for k in range(kinds):
            heads[k] = counts[k]
        for i in range(low, high):
            step = step_of[places[i]]
            best, chosen = -np.inf, 0
            for k in range(kinds):
                remaining = counts[k + 1] - heads[k]
                # Compare what the step lacks with the average place that is still to fill.
                if remaining and lacks[step, k] - share[k] > best:
                    best, chosen = lacks[step, k] - share[k], k
            samples[places[i]] = ordered[heads[chosen]]
            heads[chosen] += 1
            lacks[step, chosen] -= 1.0
