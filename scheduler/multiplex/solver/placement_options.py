"""Compiled enumeration of the degrees and quotas with which modules may be in time."""

from __future__ import annotations

import numpy as np
from numba import njit

PLACEMENT_OPTION = np.dtype([
    ("degree", np.int64),  # 0 ends the options of a module
    ("quota", np.int64),
    ("use", np.float64),  # share of the bandwidth
    ("cap", np.float64),  # largest delay (exclusive)
    ("memory", np.int64),  # bytes on each GPU
    ("area", np.int64),  # least quota steps taken from the pool
], align=True)


@njit(cache=True)
def placement_options(inputs, before):
    """Return the (K, O) :data:`PLACEMENT_OPTION` of every module that may finish before ``before``
    seconds, smallest area first; each row ends with degree 0. An option takes whole GPUs from the
    pool if no other module could join in time."""
    seconds, memory, bandwidth, entry, pool = inputs
    law, steps = pool.law, pool.steps
    modules, degrees, _ = seconds.shape
    options = np.zeros((modules, degrees * steps + 1), PLACEMENT_OPTION)
    monotone = law.additive >= 0.0 and law.product >= 0.0
    # Upper bound of any delay: everything on one GPU.
    worst = 0.0
    if monotone:
        peers = modules if law.own else 1
        worst = max(0.0, law.constant + law.additive * modules + law.product * peers)
    for m in range(modules):
        count = 0
        for j in range(degrees):
            first = count
            for q in range(1, steps + 1):
                alone = seconds[m, j, q]
                if not alone < before or memory[m, j] > pool.memory:
                    continue
                slack = before / alone - 1.0 if law.relative else before - alone
                if monotone:
                    # An option is dominated by one on as many GPUs with less quota, less bandwidth
                    # and as much slack (or more than any delay).
                    dominated = False
                    enough = min(slack, worst + 1e-9)
                    for o in range(first, count):
                        if options[m, o].use <= bandwidth[m, q] and options[m, o].cap >= enough:
                            dominated = True
                    if dominated:
                        continue
                option = options[m, count]
                option.degree, option.quota = 1 << j, q
                option.use, option.cap = bandwidth[m, q], slack
                option.memory = memory[m, j]
                shared = q < steps and entry[m, j, q] < before
                option.area = (1 << j) * (q if shared else steps)
                count += 1
        _sort_by_area(options[m], count)
    return options


@njit(cache=True)
def _sort_by_area(options, count):
    """Sort options stably by area; the place after the last one is scratch space."""
    for a in range(1, count):
        b = a
        options[count] = options[a]
        while b > 0 and options[count].area < options[b - 1].area:
            options[b] = options[b - 1]
            b -= 1
        options[b] = options[count]
    options[count].degree = 0
