"""Order of the samples in a microbatch, for modules whose replicas have consecutive shares of it.

Shares have equally many samples, so a slow replica gets lighter samples instead of fewer. If all
replicas are equally fast, each gets its part of the heavy samples. Microbatches keep their samples.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from raymm.scheduler.minibatch.measured_costs import MeasuredCosts
from raymm.scheduler.minibatch.problem import SampleSizes

# Rounds in which every sample of a microbatch may be exchanged for a better one.
ROUNDS = 8


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
