"""The least seconds of a stage by searches for placements in time, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

from raymm.scheduler.multiplex.solver.packing import FOUND, IMPOSSIBLE, pack
from raymm.scheduler.multiplex.solver.repacking import class_seconds


@njit(cache=True)
def pack_either(
    seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative, before,
    node_limit,
):
    """:func:`raymm.scheduler.multiplex.solver.packing.pack` on fuller GPUs first, and if that
    gives up on emptier ones first: what it returns, with the placements' seconds instead of
    nodes."""
    modules = seconds.shape[0]
    nobody, weights = np.zeros((modules, 2), np.int64), np.ones(modules)
    everything, empty = np.array([pool]), np.zeros(1, np.int64)
    result, _, chosen, gpus, content = pack(
        seconds, memory, bandwidth, entry, before, pool, steps, limit, coefficients, own, relative,
        False, weights, nobody, everything, empty, node_limit,
    )
    if result != FOUND and result != IMPOSSIBLE:
        result, _, chosen, gpus, content = pack(
            seconds, memory, bandwidth, entry, before, pool, steps, limit, coefficients, own,
            relative, True, weights, nobody, everything, empty, node_limit,
        )
    found = np.inf
    if result == FOUND:
        found = class_seconds(
            seconds, bandwidth, chosen, gpus, content, coefficients, own, relative
        ).max()
    return result, found, chosen, gpus, content


@njit(cache=True)
def least_seconds(
    seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative, grid, bound,
    quick_nodes, node_limit, last_resort, rounding,
):
    """Placements that take little time, and a lower bound.

    Upwards from the bound over the grid of seconds at which options appear, in growing strides,
    until something is found; back by a binary search; then below what was found until it is
    proven that nothing is, or a search gives up.

    Args:
        seconds to relative: as of :func:`pack_either`.
        grid: (V,) seconds, ascending.
        bound: no placements take less.
        quick_nodes, node_limit, last_resort: effort of a search at first, at last, and where
            nothing is found on the whole grid.
        rounding: less than this, relatively, is not better.

    Returns:
        Seconds (infinite if nothing was found), bound (infinite if there is nothing), searches,
        (K, 2), (C,), (C,) as of ``pack``.
    """
    chosen = np.zeros((seconds.shape[0], 2), np.int64)
    gpus, content = np.zeros(0, np.int64), np.zeros(0, np.int64)
    best, searches = np.inf, 0
    low = np.searchsorted(grid, bound)
    at, stride = low, 1
    while best == np.inf and at < len(grid):
        searches += 1
        result, found, new, new_gpus, new_content = pack_either(
            seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative,
            np.nextafter(grid[at], np.inf), quick_nodes,
        )
        if result == FOUND:
            best, chosen, gpus, content = found, new, new_gpus, new_content
            break
        at = max(min(at + stride, len(grid) - 1), at + 1)
        stride *= 2
    if best == np.inf:
        searches += 1
        result, best, chosen, gpus, content = pack_either(
            seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative,
            np.inf, last_resort,
        )
        if result != FOUND:
            lower = np.inf if result == IMPOSSIBLE else bound
            return np.inf, lower, searches, chosen, gpus, content
    high = np.searchsorted(grid, best)
    while low < high:
        middle = (low + high) // 2
        searches += 1
        result, found, new, new_gpus, new_content = pack_either(
            seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative,
            np.nextafter(grid[middle], np.inf), quick_nodes,
        )
        if result == FOUND:
            best, chosen, gpus, content = found, new, new_gpus, new_content
            high = min(middle, np.searchsorted(grid, best))
        else:
            if result == IMPOSSIBLE:
                bound = max(bound, grid[middle])
            low = middle + 1
    while best * (1.0 - rounding) > bound:
        searches += 1
        result, found, new, new_gpus, new_content = pack_either(
            seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative,
            best * (1.0 - rounding), node_limit,
        )
        if result == FOUND:
            best, chosen, gpus, content = found, new, new_gpus, new_content
        else:
            if result == IMPOSSIBLE:
                bound = best
            break
    return best, bound, searches, chosen, gpus, content
