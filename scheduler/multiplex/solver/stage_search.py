"""Compiled search for the least seconds of a stage. A stage that is too large to search completely
is improved by repacking a few modules at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from raymm.scheduler.multiplex.solver.packing import (
    IMPOSSIBLE,
    SOLVED,
    Packed,
    nothing_placed,
    pack,
)


class SearchEffort(NamedTuple):
    """Limits of placements per search, first, last, and if nothing is found on the whole grid.
    Relative improvements below ``rounding`` do not count."""

    quick_nodes: int
    node_limit: int
    last_resort: int
    rounding: float


class Repacking(NamedTuple):
    """Limits and parameters of repacking.

    Attributes:
        restarts: searches from scratch with a random order, before modules are kept.
        replacements: tries since the last improvement.
        least_out, most_out: number of modules that are taken out.
        perturbation: variation of the order: standard deviation of the log of a factor.
        rounding: relative improvements below this do not count.
        node_limit: limit of each search.
    """

    restarts: int
    replacements: int
    least_out: int
    most_out: int
    perturbation: float
    rounding: float
    node_limit: int


@njit(cache=True)
def class_seconds(inputs, packed):
    """Return the (K,) seconds of every module next to the others (eq. 7), as
    :func:`raymm.scheduler.multiplex.mapping.module_seconds` except for the order of sums."""
    law, bandwidth = inputs.pool.law, inputs.bandwidth
    chosen, gpus, content = packed
    modules = len(chosen)
    delay = np.zeros(modules)
    for t in range(len(gpus)):
        total, product, count = 0.0, 1.0, 0
        for m in range(modules):
            if content[t] >> m & 1:
                total += bandwidth[m, chosen[m, 1]]
                product *= bandwidth[m, chosen[m, 1]]
                count += 1
        if count < 2:
            continue
        for m in range(modules):
            if content[t] >> m & 1:
                b = bandwidth[m, chosen[m, 1]]
                coupled = b * (total - b) if law.own else product
                delay[m] = max(
                    delay[m], law.constant + law.additive * total + law.product * coupled
                )
    result = np.zeros(modules)
    for m in range(modules):
        j = 0
        while 1 << j < chosen[m, 0]:
            j += 1
        alone = inputs.seconds[m, j, chosen[m, 1]]
        result[m] = alone + delay[m] * (alone if law.relative else 1.0)
    return result


@njit(cache=True)
def pack_either(inputs, before, node_limit):
    """Run :func:`raymm.scheduler.multiplex.solver.packing.pack` for all modules, on fuller GPUs
    first, and if that gives up on emptier GPUs first. Return its results, with seconds instead of
    nodes."""
    modules = inputs.seconds.shape[0]
    empty, weights = nothing_placed(modules, inputs.pool.gpus), np.ones(modules)
    result, _, packed = pack(inputs, before, False, weights, empty, node_limit)
    if result != SOLVED and result != IMPOSSIBLE:
        result, _, packed = pack(inputs, before, True, weights, empty, node_limit)
    seconds = class_seconds(inputs, packed).max() if result == SOLVED else np.inf
    return result, seconds, packed


@njit(cache=True)
def least_seconds(inputs, grid, bound, effort):
    """Find fast placements and a lower bound of the seconds.

    The search goes up from the bound over the grid of seconds at which options appear, in growing
    strides, until it finds placements; then back by a binary search; then below the result until
    optimality is proven or a search gives up.

    Args:
        grid: (V,) seconds, ascending.
        bound: a known lower bound.

    Returns:
        Seconds (infinite if nothing was found), bound (infinite if no placements exist), number of
        searches, and a :class:`.packing.Packed`.
    """
    packed = nothing_placed(inputs.seconds.shape[0], inputs.pool.gpus)
    best, searches = np.inf, 0
    low = np.searchsorted(grid, bound)
    position, stride = low, 1
    while best == np.inf and position < len(grid):
        searches += 1
        limit = np.nextafter(grid[position], np.inf)
        result, seconds, placed = pack_either(inputs, limit, effort.quick_nodes)
        if result == SOLVED:
            best, packed = seconds, placed
            break
        position = max(min(position + stride, len(grid) - 1), position + 1)
        stride *= 2
    if best == np.inf:
        searches += 1
        result, best, packed = pack_either(inputs, np.inf, effort.last_resort)
        if result != SOLVED:
            return np.inf, np.inf if result == IMPOSSIBLE else bound, searches, packed
    high = np.searchsorted(grid, best)
    while low < high:
        middle = (low + high) // 2
        searches += 1
        limit = np.nextafter(grid[middle], np.inf)
        result, seconds, placed = pack_either(inputs, limit, effort.quick_nodes)
        if result == SOLVED:
            best, packed = seconds, placed
            high = min(middle, np.searchsorted(grid, best))
        else:
            if result == IMPOSSIBLE:
                bound = max(bound, grid[middle])
            low = middle + 1
    while best * (1.0 - effort.rounding) > bound:
        searches += 1
        limit = best * (1.0 - effort.rounding)
        result, seconds, placed = pack_either(inputs, limit, effort.node_limit)
        if result == SOLVED:
            best, packed = seconds, placed
        else:
            if result == IMPOSSIBLE:
                bound = best
            break
    return best, bound, searches, packed


@njit(cache=True)
def repack(inputs, packed, effort, seed):
    """Improve placements, and return the best :class:`.packing.Packed` found.

    First, searches start from scratch with modules in another order. Then the slowest module, some
    of its neighbours and some others are taken out and placed again by the exact search, so that
    all modules are faster than the slowest was. The search ends after ``effort.replacements`` such
    tries without improvement.
    """
    np.random.seed(seed)
    modules = len(packed.chosen)
    times = class_seconds(inputs, packed)
    empty = nothing_placed(modules, inputs.pool.gpus)
    weights = np.ones(modules)
    failed, number = 0, 0
    while failed < effort.replacements:
        limit = times.max() * (1.0 - effort.rounding)
        for m in range(modules):
            weights[m] = np.exp(effort.perturbation * np.random.standard_normal())
        fixed = empty
        if number >= effort.restarts:
            fixed = _without_some(packed, times.argmax(), effort)
            failed += 1
        spread = number % 2 == 1
        result, _, repacked = pack(inputs, limit, spread, weights, fixed, effort.node_limit)
        number += 1
        if result == SOLVED:
            packed = repacked
            times = class_seconds(inputs, packed)
            failed = 0
    return packed


@njit(cache=True)
def _without_some(packed, slowest, effort):
    """Take out the slowest module and random others, preferably its neighbours."""
    chosen, gpus, content = packed
    modules = len(chosen)
    adjacent = 0
    for t in range(len(gpus)):
        if content[t] >> slowest & 1:
            adjacent |= content[t]
    score = np.random.random(modules)
    for m in range(modules):
        if adjacent >> m & 1:
            score[m] *= 2.0
    score[slowest] = 3.0
    remaining = chosen.copy()
    out = 0
    most = np.random.randint(effort.least_out, effort.most_out + 1)
    for m in np.argsort(-score)[:most]:
        remaining[m, :] = 0
        out |= 1 << m
    # GPUs with the same remaining modules become one class.
    class_gpus, class_content = np.zeros_like(gpus), np.zeros_like(content)
    classes = 0
    for t in range(len(gpus)):
        same = 0
        while same < classes and class_content[same] != content[t] & ~out:
            same += 1
        if same == classes:
            class_content[classes] = content[t] & ~out
            classes += 1
        class_gpus[same] += gpus[t]
    return Packed(remaining, class_gpus[:classes], class_content[:classes])
