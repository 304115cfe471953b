"""Better placements of a stage that is too large to search completely: take a few modules out and
place them again, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

from raymm.scheduler.multiplex.solver.packing import FOUND, pack


@njit(cache=True)
def class_seconds(seconds, bandwidth, chosen, gpus, content, coefficients, own, relative):
    """(K,) of every module beside the others (eq. 7), as
    :func:`raymm.scheduler.multiplex.mapping.module_seconds` but for the order of sums."""
    e1, e2, e3 = coefficients
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
                coupled = b * (total - b) if own else product
                delay[m] = max(delay[m], e1 + e2 * total + e3 * coupled)
    result = np.zeros(modules)
    for m in range(modules):
        j = 0
        while 1 << j < chosen[m, 0]:
            j += 1
        alone = seconds[m, j, chosen[m, 1]]
        result[m] = alone + delay[m] * (alone if relative else 1.0)
    return result


@njit(cache=True)
def repack(
    seconds, memory, bandwidth, entry, pool, steps, limit, coefficients, own, relative, chosen,
    gpus, content, restarts, replacements, least_out, most_out, jitter, rounding, node_limit, seed,
):
    """Placements that take less time, as far as found.

    First new beginnings, with modules in another order; then, until it has not helped for
    ``replacements`` times: the slowest module, some beside it and some others are taken out and
    placed again by the exact search, so that all are faster than the slowest was.

    Args:
        seconds to relative: as of :func:`raymm.scheduler.multiplex.solver.packing.pack`.
        chosen, gpus, content: (K, 2), (C,), (C,): where to begin, as it returns them.
        restarts: new beginnings.
        least_out, most_out: how many modules are taken out.
        jitter: how much the order varies: standard deviation of a log-normal factor.
        rounding: less than this, relatively, is not better.
        node_limit: of every search.
        seed: of all that is random.

    Returns:
        (K, 2), (C,), (C,) the same of the best, which may be the first.
    """
    np.random.seed(seed)
    modules = len(chosen)
    times = class_seconds(
        seconds, bandwidth, chosen, gpus, content, coefficients, own, relative
    )
    nobody = np.zeros((modules, 2), np.int64)
    everything = np.array([pool])
    empty = np.zeros(1, np.int64)
    weights = np.ones(modules)
    failed, turn = 0, 0
    while failed < replacements:
        before = times.max() * (1.0 - rounding)
        for m in range(modules):
            weights[m] = np.exp(jitter * np.random.standard_normal())
        if turn < restarts:
            result, _, new, new_gpus, new_content = pack(
                seconds, memory, bandwidth, entry, before, pool, steps, limit, coefficients, own,
                relative, turn % 2 == 1, weights, nobody, everything, empty, node_limit,
            )
        else:
            slowest = times.argmax()
            near = 0
            for t in range(len(gpus)):
                if content[t] >> slowest & 1:
                    near |= content[t]
            score = np.random.random(modules)
            for m in range(modules):
                if near >> m & 1:
                    score[m] *= 2.0
            score[slowest] = 3.0
            kept = chosen.copy()
            out = 0
            for m in np.argsort(-score)[: np.random.randint(least_out, most_out + 1)]:
                kept[m, :] = 0
                out |= 1 << m
            # GPUs that the others leave alike are one class.
            left_gpus, left_content = np.zeros_like(gpus), np.zeros_like(content)
            classes = 0
            for t in range(len(gpus)):
                same = 0
                while same < classes and left_content[same] != content[t] & ~out:
                    same += 1
                if same == classes:
                    left_content[classes] = content[t] & ~out
                    classes += 1
                left_gpus[same] += gpus[t]
            result, _, new, new_gpus, new_content = pack(
                seconds, memory, bandwidth, entry, before, pool, steps, limit, coefficients, own,
                relative, turn % 2 == 1, weights, kept, left_gpus[:classes],
                left_content[:classes], node_limit,
            )
            failed += 1
        turn += 1
        if result == FOUND:
            chosen, gpus, content = new, new_gpus, new_content
            times = class_seconds(
                seconds, bandwidth, chosen, gpus, content, coefficients, own, relative
            )
            failed = 0
    return chosen, gpus, content
