"""Samples into as few groups as hold them within budgets, equally large in all that is levelled."""

from __future__ import annotations

import numpy as np

from raymm.scheduler.minibatch.levelling import fill, level, make_room

# Groups that compete for a sample; more level better, and take longer.
POOL_GROUPS = 128
LARGE_POOL_GROUPS = 512
# From so many on, to plan fast counts for more, and groups are more alike to begin with.
MANY_GROUPS = 20_000
# Samples that find no group in a trial pool, relative to all of it, with which the last pool
# is trusted to cope.
SPILL = 0.002
# Above this, there is no use in looking for room.
HOPELESS = 0.03


def split_into_groups(
    features: np.ndarray, limits: np.ndarray, modalities: int, ranks: int, least: int,
    random: np.random.Generator,
) -> tuple[np.ndarray, int]:
    """(N,) group of every sample, and how many groups.

    Args:
        features: (N, C) what is levelled, of every sample.
        limits: (C,) sums that no group may exceed.
        modalities: how many of the columns, the first ones, say how large a sample is.
        ranks: groups come in multiples of this.
        least: steps that the samples need at least.
        random: the generator.
    """
    n = len(features)
    size = features[:, :modalities].sum(1)
    order = random.permutation(n)
    order = order[np.argsort(-size[order], kind="stable")]
    group_of = np.empty(n, np.int64)
    steps = _enough_steps(features, limits, order, ranks, least, group_of, random)
    if steps * ranks > MANY_GROUPS:
        return _split_in_steps(features, limits, order, size, ranks, steps, random)
    # A trial pool may need more than the others, which also take from one another.
    tried = {least, (3 * least + steps) // 4, (least + steps) // 2, steps}
    best: tuple[np.ndarray, int] | None = None
    for count in sorted(tried):
        if best is None or count * ranks < best[1]:
            result = _split_in_steps(features, limits, order, size, ranks, count, random)
            if best is None or result[1] < best[1]:
                best = result
    assert best is not None
    return best


def _split_in_steps(
    features: np.ndarray, limits: np.ndarray, order: np.ndarray, size: np.ndarray, ranks: int,
    steps: int, random: np.random.Generator,
) -> tuple[np.ndarray, int]:
    """:func:`split_into_groups` in so many steps, or more."""
    n = len(order)
    group_of = np.empty(n, np.int64)
    pools, pool_steps = _pools(steps, ranks)
    of_pool = np.minimum(_split_groups(n, steps, random) // pool_steps, pools - 1)
    by_pool = np.argsort(of_pool.astype(np.uint16 if pools <= 1 << 16 else np.int64),
                         kind="stable")
    stops = np.cumsum(np.bincount(of_pool, minlength=pools))
    carried, first = np.zeros(0, np.int64), 0
    for pool in range(pools):
        mine = order[by_pool[stops[pool - 1] if pool else 0 : stops[pool]]]
        if len(carried):
            mine = np.concatenate([carried, mine])
            mine = mine[np.argsort(-size[mine], kind="stable")]
        count = pool_steps if pool < pools - 1 else steps - pool_steps * (pools - 1)
        spilled = _level(features, mine, limits, count * ranks, group_of)
        while pool == pools - 1 and spilled:
            count += max(1, spilled * count // (8 * len(mine)))
            spilled = _level(features, mine, limits, count * ranks, group_of)
        placed = group_of[mine] >= 0
        _fill_empty(group_of, mine[placed], count * ranks)
        group_of[mine[placed]] += first
        first += count * ranks
        carried = mine[~placed]
    return group_of, first


def _pools(steps: int, ranks: int) -> tuple[int, int]:
    """How many pools, and steps in each; the last one has the rest as well."""
    few = steps * ranks <= MANY_GROUPS
    pool_steps = max(1, (LARGE_POOL_GROUPS if few else POOL_GROUPS) // ranks)
    return max(1, steps // pool_steps), pool_steps


def _split_groups(n: int, slots: int, random: np.random.Generator) -> np.ndarray:
    """(n,) a slot for every place, such that every run of ``slots`` places from a multiple of it
    has every slot once."""
    rounds = -(-n // slots)
    split_groups = np.broadcast_to(np.arange(slots), (rounds, slots))
    return random.permuted(split_groups, axis=1).ravel()[:n]


def _enough_steps(
    features: np.ndarray, limits: np.ndarray, order: np.ndarray, ranks: int, least: int,
    group_of: np.ndarray, random: np.random.Generator,
) -> int:
    """Steps with which nearly all samples of a trial pool find a group."""
    steps, n = least, len(order)
    while steps * ranks < n:
        pools, pool_steps = _pools(steps, ranks)
        if pools == 1:
            return steps  # the only pool looks for itself
        trial = order[_split_groups(n, steps, random) < pool_steps]
        spilled = _level(features, trial, limits, pool_steps * ranks, group_of)
        if spilled <= SPILL * len(trial):
            return steps
        steps += max(1, spilled * steps // (4 * len(trial)))
    return steps


def _level(
    features: np.ndarray, order: np.ndarray, limits: np.ndarray, groups: int, group_of: np.ndarray
) -> int:
    """:func:`level`; where samples find no group that way, :func:`make_room` for them, or else
    :func:`fill`."""
    spilled = level(features, order, limits, groups, group_of)
    if not 0 < spilled <= HOPELESS * len(order):
        return spilled
    spilled = make_room(features, order, limits, groups, group_of)
    if not spilled:
        return 0
    levelled = group_of[order]
    filled = fill(features, order, limits, groups, group_of)
    if 0 < filled <= HOPELESS * len(order):
        filled = make_room(features, order, limits, groups, group_of)
    if filled < spilled:
        return filled
    group_of[order] = levelled
    return spilled


def _fill_empty(group_of: np.ndarray, samples: np.ndarray, groups: int) -> None:
    """Give every empty group a sample of a group that has several, as far as there are."""
    counts = np.bincount(group_of[samples], minlength=groups)
    for empty in np.flatnonzero(counts == 0):
        giver = int(counts.argmax())
        if counts[giver] < 2:
            return
        group_of[samples[np.flatnonzero(group_of[samples] == giver)[-1]]] = empty
        counts[giver] -= 1
        counts[empty] += 1
