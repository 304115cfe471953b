"""Distribution of samples over replicas of a module that differ in speed.

Microbatch i of a step goes to replica i mod n of a module with n replicas. The samples of every
step are redistributed over its microbatches, so that these take equally long on their replicas.
Steps keep their samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from raymm.scheduler.minibatch.measured_costs import MeasuredCosts
from raymm.scheduler.minibatch.problem import SampleSizes

# Relative seconds of a replica are clipped to this range: a much faster replica would otherwise get
# microbatches that exceed the planned memory.
LEAST_FACTOR, MOST_FACTOR = 0.4, 3.0
# Weight of uneven loads of modules with equally fast replicas: they have their share of the step
# anyway, and only microbatches differ.
EVEN_WEIGHT = 0.1
# Rounds in which every sample of a step may move to a better place.
ROUNDS = 8


def split_over_replicas(
    samples: np.ndarray, offsets: np.ndarray, ranks: int, sizes: SampleSizes,
    measured: MeasuredCosts, limits: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and offsets of groups that take equally long on their replicas.

    Per step, this lowers the sum over modules and microbatches of squared seconds (on a replica of
    mean speed) times the relative seconds of the replica, by placing samples one by one and then
    moving and exchanging them. For a single module the sum is least if all microbatches take
    equally long.

    Args:
        samples, offsets: groups of a plan, ``ranks`` per step.
        measured: costs of units, and relative seconds of replicas.
        limits: (M,) most units of a group; infinite for no limit. A step whose samples do not fit
            keeps its groups.
    """
    seconds = measured.of_samples(sizes.names, sizes.values)
    if not seconds.any():
        return samples, offsets
    factors = np.clip(measured.factors(sizes.names, ranks), LEAST_FACTOR, MOST_FACTOR)
    even = [n not in measured.replicas or n in measured.shared for n in sizes.names]
    factors[even] *= EVEN_WEIGHT
    fixed = np.array([measured.modules[n].fixed if n in measured.modules else 0.0
                      for n in sizes.names])  # fmt: skip
    rules = _Rules(np.ascontiguousarray(factors), fixed, limits.astype(np.float64))
    units = sizes.values.astype(np.float64)
    group_of = _split(seconds, units, samples, offsets, ranks, rules)
    counts = np.bincount(group_of, minlength=len(offsets) - 1)
    return (
        samples[np.argsort(group_of, kind="stable")], np.concatenate([[0], np.cumsum(counts)])
    )


class _Rules(NamedTuple):
    """Criteria for the split of a step: (M, ranks) relative seconds of each microbatch's replica,
    (M,) fixed seconds of a microbatch, and (M,) most units of a microbatch."""

    factors: np.ndarray
    fixed: np.ndarray
    limits: np.ndarray


class _Step(NamedTuple):
    """The n samples of a step, and the microbatch of each.

    Attributes:
        seconds, units: (n, M) of the samples.
        loads, used: (ranks, M) seconds and units of the microbatches.
        counts: (ranks,) samples of the microbatches.
        slot_of: (n,) microbatch of every sample; -1 if it has none yet.
    """

    seconds: np.ndarray
    units: np.ndarray
    loads: np.ndarray
    used: np.ndarray
    counts: np.ndarray
    slot_of: np.ndarray


@njit(cache=True)
def _split(seconds, units, samples, offsets, ranks, rules):
    """Return the (len(samples),) group of every sample."""
    groups = offsets.shape[0] - 1
    result = np.empty(samples.shape[0], np.int64)
    for first in range(0, groups, ranks):
        begin, end = offsets[first], offsets[first + ranks]
        step_samples = samples[begin:end]
        step = _Step(
            seconds[step_samples], units[step_samples], np.empty((ranks, seconds.shape[1])),
            np.zeros((ranks, seconds.shape[1])), np.zeros(ranks, np.int64),
            np.full(end - begin, -1, np.int64),
        )
        for g in range(ranks):
            step.loads[g] = rules.fixed
        if _split_one_by_one(step, rules):
            for _ in range(ROUNDS):
                if not _improve(step, rules):
                    break
            for i in range(end - begin):
                result[begin + i] = first + step.slot_of[i]
        else:
            for g in range(first, first + ranks):
                result[offsets[g] : offsets[g + 1]] = g
    return result


@njit(cache=True)
def _split_one_by_one(step, rules):
    """Place samples, largest first, where the sum grows least; return False if one does not fit."""
    n, columns = step.seconds.shape
    ranks = step.counts.shape[0]
    total = np.zeros(n)
    for i in range(n):
        total[i] = -step.seconds[i].sum()
    empty = min(ranks, n)  # groups without a sample
    unplaced = n
    for i in np.argsort(total, kind="mergesort"):
        target, best = -1, np.inf
        for g in range(ranks):
            if unplaced <= empty and step.counts[g]:
                continue
            score, fits = 0.0, True
            for c in range(columns):
                s = step.seconds[i, c]
                score += rules.factors[c, g] * s * (step.loads[g, c] + 0.5 * s)
                fits = fits and step.used[g, c] + step.units[i, c] <= rules.limits[c]
            if fits and score < best:
                target, best = g, score
        if target < 0:
            return False
        empty -= step.counts[target] == 0
        unplaced -= 1
        _add(step, i, target, 1)
        step.slot_of[i] = target
    return True


@njit(cache=True)
def _add(step, sample, slot, sign):
    for c in range(step.loads.shape[1]):
        step.loads[slot, c] += sign * step.seconds[sample, c]
        step.used[slot, c] += sign * step.units[sample, c]
    step.counts[slot] += sign


@njit(cache=True)
def _improve(step, rules):
    """Move every sample to its best place, alone or in exchange; return False if all stay."""
    n, columns = step.seconds.shape
    ranks = step.counts.shape[0]
    loads, used, slot_of = step.loads, step.used, step.slot_of
    changed = False
    for i in range(n):
        a = slot_of[i]
        best, target, partner = -1e-9 * _sum(rules.factors, loads), -1, -1
        for j in range(-ranks, n):  # negative: move alone to group -1 - j
            b = -1 - j if j < 0 else slot_of[j]
            if b == a or (j < 0 and step.counts[a] < 2):
                continue
            change, fits = 0.0, True
            for c in range(columns):
                s, u, limit = step.seconds[i, c], step.units[i, c], rules.limits[c]
                if j >= 0:
                    s -= step.seconds[j, c]
                    u -= step.units[j, c]
                change += rules.factors[c, b] * s * (2.0 * loads[b, c] + s)
                change -= rules.factors[c, a] * s * (2.0 * loads[a, c] - s)
                fits = fits and used[b, c] + u <= limit and used[a, c] - u <= limit
            if fits and change < best:
                best, target, partner = change, b, j
        if target >= 0:
            changed = True
            _add(step, i, a, -1)
            _add(step, i, target, 1)
            slot_of[i] = target
            if partner >= 0:
                _add(step, partner, target, -1)
                _add(step, partner, a, 1)
                slot_of[partner] = a
    return changed


@njit(cache=True)
def _sum(factors, loads):
    total = 0.0
    for g in range(loads.shape[0]):
        for c in range(loads.shape[1]):
            total += factors[c, g] * loads[g, c] ** 2
    return total
