"""Can modules share GPUs so that all are done in time? An exact search, compiled.

GPUs with the same modules on them are one *class* of GPUs and are not told apart. Modules are
placed one after the other: an option (degree and quota) is chosen, then how many GPUs of every
class get a replica, which splits classes. Classes are never aligned to anything: any set of GPUs
may be a module's.

What prunes, and why it is safe although eq. 8 is not monotone (its product falls when a third
module joins a GPU): modules on a GPU either stay as they are, and then their delay is known, or
somebody joins, and then it is at least what the joiner with the least bandwidth costs by the
additive term. A branch ends when neither is in time. GPUs that nobody may join count as full when
free quota is compared with what the other modules need at least.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FOUND, IMPOSSIBLE, GAVE_UP = 1, 0, -1


@njit(cache=True)
def _in_time(members, use, cap, more, least_use, most_use, e1, e2, e3, own):
    """(as it is, if somebody joins): are the members' delays below their caps?

    The second is a lower bound of the delay, so it may say yes wrongly, but never no.
    """
    total, product, count = 0.0, 1.0, 0
    rest = members
    level = 0
    while rest:
        if rest & 1:
            total += use[level]
            product *= use[level]
            count += 1
        rest >>= 1
        level += 1
    as_is = True
    joined = more
    base = e1 + e2 * total
    grown = base + (e2 * least_use if e2 >= 0 else e2 * most_use)
    rest = members
    level = 0
    while rest:
        if rest & 1:
            b = use[level]
            if count > 1:
                coupled = b * (total - b) if own else product
                if not max(0.0, base + e3 * coupled) < cap[level]:
                    as_is = False
            elif not cap[level] > 0.0:
                as_is = False
            if joined:
                if own:
                    added = e3 * b * (total - b + (least_use if e3 >= 0 else most_use))
                else:
                    added = 0.0 if e3 >= 0 else e3 * product
                if not max(0.0, grown + added) < cap[level]:
                    joined = False
        rest >>= 1
        level += 1
    return as_is, joined


@njit(cache=True)
def _close_level(
    level, modules, count, gpus, members, quota, opened, order, use, cap, need, least_use,
    most_use, steps, interference, own, spread,
):
    """Whether the classes at ``level``, where that many modules are placed, may still do.

    Notes which classes may be joined and in which order: fullest first (best fit) or emptiest
    first, which spreads out who disturbs whom.
    """
    e1, e2, e3 = interference
    free = 0
    for t in range(count[level]):
        opened[level, t] = True
        if members[level, t]:
            as_is, joined = _in_time(
                members[level, t], use, cap, level < modules and quota[level, t] < steps,
                least_use[level], most_use[level], e1, e2, e3, own,
            )
            if not as_is and not joined:
                return False
            opened[level, t] = joined
        if opened[level, t]:
            free += gpus[level, t] * (steps - quota[level, t])
    if free < need[level]:
        return False
    for a in range(count[level]):
        order[level, a] = a
        for b in range(a, 0, -1):
            before, here = quota[level, order[level, b - 1]], quota[level, order[level, b]]
            if (here >= before) if spread else (here <= before):
                break
            order[level, b - 1], order[level, b] = order[level, b], order[level, b - 1]
    return True


@njit(cache=True)
def _search(
    count, gpus, members, quota, memory, options, option_count, use_of, cap_of, memory_of, chosen,
    need, least_use, most_use, use, cap, first, steps, limit, interference, own, spread,
    node_limit,
):
    """Depth first over options and, per class of GPUs, how many get a replica.

    Modules below level ``first`` stay where row ``first`` has them. Row ``level`` of the classes
    is how they are before the module at ``level`` is placed; its decisions write row
    ``level + 1``. Returns what :func:`pack` does, and nodes.
    """
    modules, width = option_count.shape[0], gpus.shape[1]
    e1, e2, e3 = interference
    opened = np.zeros((modules + 1, width), np.bool_)
    order = np.zeros((modules + 1, width), np.int64)
    taken = np.zeros((modules, width), np.int64)
    left_at = np.zeros((modules, width), np.int64)
    written_at = np.zeros((modules, width), np.int64)
    decided = np.zeros(modules, np.int64)
    nodes, level, at, left, written = 0, first, 0, 0, 0
    chosen[first] = -1
    if not _close_level(
        first, modules, count, gpus, members, quota, opened, order, use, cap, need, least_use,
        most_use, steps, interference, own, spread,
    ):
        return IMPOSSIBLE, nodes
    next_option, back = True, False
    while True:
        if next_option:
            next_option = False
            chosen[level] += 1
            if chosen[level] == option_count[level]:
                level -= 1
                if level < first:
                    return IMPOSSIBLE, nodes
                back = True
            else:
                use[level] = use_of[level, chosen[level]]
                cap[level] = cap_of[level, chosen[level]]
                at, left, written = 0, options[level, chosen[level], 0], 0
        if back:
            back = False
            at = decided[level] - 1
            while at >= 0 and taken[level, at] == 0:
                at -= 1
            if at < 0:
                next_option = True
                continue
            taken[level, at] -= 1
        elif left == 0:
            # All replicas are placed: the classes left over stay as they are.
            decided[level] = at
            for a in range(at, count[level]):
                t = order[level, a]
                gpus[level + 1, written] = gpus[level, t]
                members[level + 1, written] = members[level, t]
                quota[level + 1, written] = quota[level, t]
                memory[level + 1, written] = memory[level, t]
                written += 1
            count[level + 1] = written
            if not _close_level(
                level + 1, modules, count, gpus, members, quota, opened, order, use, cap, need,
                least_use, most_use, steps, interference, own, spread,
            ):
                back = True
                continue
            level += 1
            if level == modules:
                return FOUND, nodes
            chosen[level] = -1
            next_option = True
            continue
        else:
            nodes += 1
            if nodes > node_limit:
                return GAVE_UP, nodes
            have = 0
            for a in range(at, count[level]):
                have += gpus[level, order[level, a]]
            if have < left:
                decided[level] = at
                back = True
                continue
            t, option = order[level, at], chosen[level]
            q = options[level, option, 1]
            fits = opened[level, t] and quota[level, t] + q <= steps
            fits = fits and memory[level, t] + memory_of[level, option] <= limit
            if fits:
                as_is, joined = _in_time(
                    members[level, t] | (1 << level), use, cap,
                    level + 1 < modules and quota[level, t] + q < steps,
                    least_use[level + 1], most_use[level + 1], e1, e2, e3, own,
                )
                fits = as_is or joined
            taken[level, at] = min(gpus[level, t], left) if fits else 0
            left_at[level, at], written_at[level, at] = left, written
        t, option, some = order[level, at], chosen[level], taken[level, at]
        left, written = left_at[level, at] - some, written_at[level, at]
        if some:
            gpus[level + 1, written] = some
            members[level + 1, written] = members[level, t] | (1 << level)
            quota[level + 1, written] = quota[level, t] + options[level, option, 1]
            memory[level + 1, written] = memory[level, t] + memory_of[level, option]
            written += 1
        if some < gpus[level, t]:
            gpus[level + 1, written] = gpus[level, t] - some
            members[level + 1, written] = members[level, t]
            quota[level + 1, written] = quota[level, t]
            memory[level + 1, written] = memory[level, t]
            written += 1
        at += 1


@njit(cache=True)
def _choices(
    seconds, memory, bandwidth, entry, before, steps, limit, e1, e2, e3, own, relative,
):
    """Options of every module that may be done before ``before``, those that need little first.

    Returns (K, O, 2) degree and quota, (K,) their number, and of each bandwidth use, cap of the
    delay, memory, and the quota steps it takes from the pool at least: of whole GPUs where no
    other module could join in time.
    """
    modules, degrees, _ = seconds.shape
    most = degrees * steps
    options = np.zeros((modules, most, 2), np.int64)
    counts = np.zeros(modules, np.int64)
    use = np.zeros((modules, most))
    cap = np.zeros((modules, most))
    bytes_of = np.zeros((modules, most), np.int64)
    area = np.zeros((modules, most), np.int64)
    monotone = e2 >= 0.0 and e3 >= 0.0
    for m in range(modules):
        # No delay exceeds this: everything on one GPU.
        worst = 0.0
        if monotone:
            worst = max(0.0, e1 + e2 * modules + e3 * (modules if own else 1))
        for j in range(degrees):
            first = counts[m]
            for q in range(1, steps + 1):
                alone = seconds[m, j, q]
                if not alone < before or memory[m, j] > limit:
                    continue
                slack = before / alone - 1.0 if relative else before - alone
                if monotone:
                    # The same GPUs with less quota, less bandwidth and as much slack (or more
                    # than any delay) would do as well.
                    dominated = False
                    for o in range(first, counts[m]):
                        if use[m, o] <= bandwidth[m, q] and cap[m, o] >= min(slack, worst + 1e-9):
                            dominated = True
                    if dominated:
                        continue
                o = counts[m]
                options[m, o, 0] = 1 << j
                options[m, o, 1] = q
                use[m, o] = bandwidth[m, q]
                cap[m, o] = slack
                bytes_of[m, o] = memory[m, j]
                shared = q < steps and entry[m, j, q] < before
                area[m, o] = (1 << j) * (q if shared else steps)
                counts[m] += 1
        # By area, then by slack: insertion sort, stable.
        for a in range(1, counts[m]):
            for b in range(a, 0, -1):
                if area[m, b] < area[m, b - 1]:
                    for c in range(2):
                        options[m, b, c], options[m, b - 1, c] = (
                            options[m, b - 1, c], options[m, b, c],
                        )
                    use[m, b], use[m, b - 1] = use[m, b - 1], use[m, b]
                    cap[m, b], cap[m, b - 1] = cap[m, b - 1], cap[m, b]
                    bytes_of[m, b], bytes_of[m, b - 1] = bytes_of[m, b - 1], bytes_of[m, b]
                    area[m, b], area[m, b - 1] = area[m, b - 1], area[m, b]
                else:
                    break
    return options, counts, use, cap, bytes_of, area


@njit(cache=True)
def pack(
    seconds, memory, bandwidth, entry, before, pool, steps, limit, coefficients, own, relative,
    spread, weights, kept, kept_gpus, kept_content, node_limit,
):
    """Options and GPUs for modules such that each is done before ``before``.

    Args:
        seconds: (K, J, steps + 1) alone, by module, log2 of the degree and quota.
        memory: (K, J) int64, bytes on each GPU.
        bandwidth: (K, steps + 1) share of the bandwidth.
        entry: (K, J, steps + 1) lower bounds of seconds beside any other module.
        before: seconds; strictly.
        pool, steps, limit: GPUs, quota steps of each, bytes of each.
        coefficients: (3,) e1, e2, e3 of eq. 8.
        own, relative: the interference's coupling and unit.
        spread: place on emptier GPUs first.
        weights: (K,) modules are placed in order of what they need at least, times this.
        kept: (K, 2) degree and quota of modules that stay where they are; 0 for the others.
        kept_gpus, kept_content: (C,) classes of GPUs: how many, and which of those modules are
            there, as bits. (``[pool]`` and ``[0]`` for none.)
        node_limit: give up after so many placements tried.

    Returns:
        FOUND, IMPOSSIBLE (proven; where modules stay, for as they stay) or GAVE_UP; nodes used;
        (K, 2) degree and quota of every module; and the classes of GPUs: (C,) how many, (C,)
        which modules, as bits.
    """
    e1, e2, e3 = coefficients
    modules = seconds.shape[0]
    options, counts, use_of, cap_of, bytes_of, area = _choices(
        seconds, memory, bandwidth, entry, before, steps, limit, e1, e2, e3, own, relative
    )
    solution = np.zeros((modules, 2), np.int64)
    nothing = np.zeros(0, np.int64)
    least = np.zeros(modules, np.int64)
    first = 0
    for m in range(modules):
        if not counts[m]:
            return IMPOSSIBLE, 0, solution, nothing, nothing
        least[m] = area[m, 0]
        first += kept[m, 0] > 0
    if least.sum() > pool * steps or first == modules:
        return IMPOSSIBLE, 0, solution, nothing, nothing
    # Those that stay come first, then those that need most.
    order = np.argsort(np.where(kept[:, 0] > 0, -np.inf, -(least * weights)), kind="mergesort")
    use, cap = np.zeros(modules), np.zeros(modules)
    bytes_kept = np.zeros(modules, np.int64)
    for level in range(first):
        m = order[level]
        j = 0
        while 1 << j < kept[m, 0]:
            j += 1
        alone = seconds[m, j, kept[m, 1]]
        if not alone < before:
            return IMPOSSIBLE, 0, solution, nothing, nothing
        use[level] = bandwidth[m, kept[m, 1]]
        cap[level] = before / alone - 1.0 if relative else before - alone
        bytes_kept[level] = memory[m, j]
    options, counts, use_of = options[order], counts[order], use_of[order]
    cap_of, bytes_of = cap_of[order], bytes_of[order]
    need = np.zeros(modules + 1, np.int64)
    least_use = np.full(modules + 1, np.inf)
    most_use = np.zeros(modules + 1)
    for level in range(modules - 1, first - 1, -1):
        need[level] = need[level + 1] + least[order[level]]
        uses = use_of[level, : counts[level]]
        least_use[level] = min(least_use[level + 1], uses.min())
        most_use[level] = most_use[level + 1] + uses.max()
    least_use[modules] = 0.0
    width = pool + 1
    count = np.zeros(modules + 1, np.int64)
    gpus = np.zeros((modules + 1, width), np.int64)
    members = np.zeros((modules + 1, width), np.int64)
    quota = np.zeros((modules + 1, width), np.int64)
    used = np.zeros((modules + 1, width), np.int64)
    count[first] = len(kept_gpus)
    for t in range(len(kept_gpus)):
        gpus[first, t] = kept_gpus[t]
        for level in range(first):
            if kept_content[t] >> order[level] & 1:
                members[first, t] |= 1 << level
                quota[first, t] += kept[order[level], 1]
                used[first, t] += bytes_kept[level]
    chosen = np.zeros(modules, np.int64)
    result, tried = _search(
        count, gpus, members, quota, used, options, counts, use_of, cap_of, bytes_of, chosen, need,
        least_use, most_use, use, cap, first, steps, limit, coefficients, own, spread, node_limit,
    )
    if result != FOUND:
        return result, tried, solution, nothing, nothing
    classes = count[modules]
    content = np.zeros(classes, np.int64)
    for level in range(modules):
        m = order[level]
        solution[m] = kept[m] if level < first else options[level, chosen[level]]
        for t in range(classes):
            if members[modules, t] >> level & 1:
                content[t] |= 1 << order[level]
    return result, tried, solution, gpus[modules, :classes].copy(), content
