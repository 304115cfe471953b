"""Less work for replicas of a module that are slower, more for those that are faster.

Microbatch i of a step goes to copy i mod n of a module with n copies. So the samples of every step
are dealt anew over its microbatches, to take equally long on the copies they go to; which samples
are in a step stays.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from raymm.scheduler.minibatch.measured_costs import MeasuredCosts
from raymm.scheduler.minibatch.problem import SampleSizes

# Relative seconds of a copy beyond these are not made up for in full: a copy that is much faster
# than the others would get microbatches that no memory was planned for.
LEAST_FACTOR, MOST_FACTOR = 0.4, 3.0
# What unevenness of a module whose copies are equally fast counts beside that of others: its
# copies have their share of the step all the same, it is only that microbatches differ.
EVEN_WEIGHT = 0.1
# Rounds of looking for a better place for every sample of a step.
ROUNDS = 8


def split_over_replicas(
    samples: np.ndarray, offsets: np.ndarray, ranks: int, sizes: SampleSizes,
    measured: MeasuredCosts, limits: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and offsets of groups that are alike in seconds on the copies they go to.

    Per step the sum over modules and microbatches of squared seconds (on a copy of mean speed)
    times the relative seconds of their copy is lowered, by dealing samples one by one and then
    moving and exchanging them. For one module it is least where all take equally long.

    Args:
        samples, offsets: groups of a plan, ``ranks`` to a step.
        ranks: microbatches per step.
        sizes: of all samples, in units.
        measured: what units cost, and how copies differ.
        limits: (M,) units that no group may exceed; infinite for no limit. A step in which
            dealing finds no place within them keeps its groups.
    """
    factors = np.clip(measured.factors(sizes.names, ranks), LEAST_FACTOR, MOST_FACTOR)
    even = [name not in measured.replicas for name in sizes.names]
    factors[even] *= EVEN_WEIGHT
    fixed = np.array([measured.modules[n].fixed if n in measured.modules else 0.0
                      for n in sizes.names])  # fmt: skip
    seconds = measured.of_samples(sizes.names, sizes.values)
    if not seconds.any():
        return samples, offsets
    group_of = _deal(
        seconds, sizes.values.astype(np.float64), samples, offsets, ranks,
        np.ascontiguousarray(factors), fixed, limits.astype(np.float64), ROUNDS,
    )
    counts = np.bincount(group_of, minlength=len(offsets) - 1)
    return (
        samples[np.argsort(group_of, kind="stable")], np.concatenate([[0], np.cumsum(counts)])
    )


@njit(cache=True)
def _deal(seconds, units, samples, offsets, ranks, factors, fixed, limits, rounds):
    """(n,) group of every place in ``samples``."""
    groups = offsets.shape[0] - 1
    columns = seconds.shape[1]
    result = np.empty(samples.shape[0], np.int64)
    for first in range(0, groups, ranks):
        begin, end = offsets[first], offsets[first + ranks]
        mine = samples[begin:end]
        slot_of = np.full(end - begin, -1, np.int64)
        loads = np.empty((ranks, columns))
        used = np.zeros((ranks, columns))
        counts = np.zeros(ranks, np.int64)
        for g in range(ranks):
            loads[g] = fixed
        if _split_one_by_one(
            seconds, units, mine, factors, limits, loads, used, counts, slot_of
        ):
            for _ in range(rounds):
                if not _improve(
                    seconds, units, mine, factors, limits, loads, used, counts, slot_of
                ):
                    break
            for i in range(end - begin):
                result[begin + i] = first + slot_of[i]
        else:
            for g in range(first, first + ranks):
                result[offsets[g] : offsets[g + 1]] = g
    return result


@njit(cache=True)
def _split_one_by_one(seconds, units, mine, factors, limits, loads, used, counts, slot_of):
    """Largest first, each where the sum grows least; False if one has no place."""
    ranks, columns = loads.shape
    total = np.zeros(mine.shape[0])
    for i in range(mine.shape[0]):
        total[i] = -seconds[mine[i]].sum()
    empty = min(ranks, mine.shape[0])  # groups that must still get their first sample
    left = mine.shape[0]
    for i in np.argsort(total, kind="mergesort"):
        found, best = -1, np.inf
        for g in range(ranks):
            if left <= empty and counts[g]:
                continue
            score, fits = 0.0, True
            for c in range(columns):
                s = seconds[mine[i], c]
                score += factors[c, g] * s * (loads[g, c] + 0.5 * s)
                fits = fits and used[g, c] + units[mine[i], c] <= limits[c]
            if fits and score < best:
                found, best = g, score
        if found < 0:
            return False
        empty -= counts[found] == 0
        left -= 1
        _put(seconds, units, mine[i], loads, used, counts, found, 1)
        slot_of[i] = found
    return True


@njit(cache=True)
def _put(seconds, units, sample, loads, used, counts, slot, sign):
    for c in range(loads.shape[1]):
        loads[slot, c] += sign * seconds[sample, c]
        used[slot, c] += sign * units[sample, c]
    counts[slot] += sign


@njit(cache=True)
def _improve(seconds, units, mine, factors, limits, loads, used, counts, slot_of):
    """Give every sample the best of all other places, alone or in exchange for another sample;
    False if all stay."""
    ranks, columns = loads.shape
    n = mine.shape[0]
    changed = False
    for i in range(n):
        a = slot_of[i]
        best, to, other = -1e-9 * _sum(factors, loads), -1, -1
        for j in range(-ranks, n):  # below 0: alone, to that group
            b = -1 - j if j < 0 else slot_of[j]
            if b == a or (j < 0 and counts[a] < 2):
                continue
            change, fits = 0.0, True
            for c in range(columns):
                s, u = seconds[mine[i], c], units[mine[i], c]
                if j >= 0:
                    s -= seconds[mine[j], c]
                    u -= units[mine[j], c]
                change += factors[c, b] * s * (2.0 * loads[b, c] + s)
                change -= factors[c, a] * s * (2.0 * loads[a, c] - s)
                fits = fits and used[b, c] + u <= limits[c] and used[a, c] - u <= limits[c]
            if fits and change < best:
                best, to, other = change, b, j
        if to >= 0:
            changed = True
            _put(seconds, units, mine[i], loads, used, counts, a, -1)
            _put(seconds, units, mine[i], loads, used, counts, to, 1)
            slot_of[i] = to
            if other >= 0:
                _put(seconds, units, mine[other], loads, used, counts, to, -1)
                _put(seconds, units, mine[other], loads, used, counts, a, 1)
                slot_of[other] = a
    return changed


@njit(cache=True)
def _sum(factors, loads):
    total = 0.0
    for g in range(loads.shape[0]):
        for c in range(loads.shape[1]):
            total += factors[c, g] * loads[g, c] ** 2
    return total
