"""Assignment of samples to as few groups as the budgets allow, with equal sums in all levelled
columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raymm.errors import InternalError
from raymm.scheduler.minibatch.levelling import fill, level, make_room

# Number of groups that compete for a sample; more groups level better but take longer.
POOL_GROUPS = 128
LARGE_POOL_GROUPS = 256
# Above this number of groups, planning speed has priority; groups are more equal then anyway.
MANY_GROUPS = 20_000
# A sample is large if it exceeds the mean group by the factor LARGE. The mean group of the other
# steps must keep at least LEAST_REST of its size.
LARGE = 1.02
LEAST_REST = 0.3
# Groups are filled up to large samples if ranks would otherwise wait this long, relative to the
# work of all steps.
WORTH_FILLING = 0.002
# Accepted fraction of samples without a group in a trial pool; the last pool copes with them.
SPILL = 0.002
# Above this fraction of samples without a group, making room is not tried.
HOPELESS = 0.03


class Groups(NamedTuple):
    """Samples in groups.

    Attributes:
        group_of: (N,) group of every sample.
        count: number of groups, a multiple of the ranks.
        large: number of groups, a multiple of the ranks, that exceed the others because of one
            large sample. They come first, and those of one step are together.
    """

    group_of: np.ndarray
    count: int
    large: int


class _Samples(NamedTuple):
    """Samples to group.

    Attributes:
        features: (N, C) columns to level.
        limits: (C,) largest sums of a group.
        size: (N,) sums of the modalities.
        order: (N,) samples, the largest first.
    """

    features: np.ndarray
    limits: np.ndarray
    size: np.ndarray
    order: np.ndarray


class _LargeSamples(NamedTuple):
    """Samples that make their group larger than the others, step by step: (H,) samples, one for
    each group of the first steps, and the (H, C) excess of their groups, equal within a step."""

    samples: np.ndarray
    extra: np.ndarray

    @classmethod
    def none(cls, columns: int) -> _LargeSamples:
        return cls(np.zeros(0, np.int64), np.zeros((0, columns)))


def split_into_groups(
    features: np.ndarray, limits: np.ndarray, modalities: int, cost: np.ndarray, ranks: int,
    least: int, random: np.random.Generator,
) -> Groups:
    """Split samples into groups. A step takes as long as its largest group, so samples larger than
    the mean group share steps, whose other groups are filled up to the largest sample.

    Args:
        features: (N, C) columns to level, of every sample.
        limits: (C,) largest sums of a group.
        modalities: number of the first columns, which are sizes.
        cost: (N,) of every sample.
        ranks: the number of groups is a multiple of this.
        least: lower bound of the number of steps.
    """
    n = len(features)
    size = features[:, :modalities].sum(1)
    order = random.permutation(n)
    order = order[np.argsort(-size[order], kind="stable")]
    samples = _Samples(features, limits, size, order)
    steps = _enough_steps(features, limits, order, ranks, least, np.empty(n, np.int64), random)
    # The trial pool may need more steps than others, which can pass samples on to the next pool.
    many = steps * ranks > MANY_GROUPS
    tried = {steps} if many else {least, (least + steps) // 2, steps}
    splits: dict[int, Groups] = {}  # index into `ways` -> split
    for count in sorted(tried):
        ways = [_LargeSamples.none(features.shape[1])]
        if not many:
            ways += _large_samples(features, modalities, order, ranks, count)
        for way, large in enumerate(ways):
            if way not in splits:
                split = _split_in_steps(samples, ranks, count, large, count < steps, random)
                if split is not None:
                    splits[way] = split
        if len(splits) >= len(ways):
            return min(splits.values(), key=lambda split: _seconds(split, cost, ranks))
    raise InternalError("no number of steps was accepted, not even the largest")


def _seconds(split: Groups, cost: np.ndarray, ranks: int) -> float:
    """Return the sum over steps of their largest group's cost, with groups sorted by cost."""
    costs = np.bincount(split.group_of, cost, split.count)
    costs[split.large :].sort()
    return float(costs.reshape(-1, ranks).max(1).sum())


def _large_samples(
    features: np.ndarray, modalities: int, order: np.ndarray, ranks: int, steps: int
) -> list[_LargeSamples]:
    """Find the samples that are larger than the mean group, in whole steps; none if ranks would
    hardly wait for them."""
    sizes = features[:, :modalities]
    remaining = totals = sizes.sum(0) / ranks  # of a group, summed over steps
    least = LEAST_REST * remaining / steps
    free = np.ones(len(features), np.bool_)
    chunks: list[np.ndarray] = []
    levels: list[np.ndarray] = []
    idle = 0.0  # waiting time of ranks for large samples, relative to the work of all steps
    for column in range(modalities):
        largest = order[np.argsort(-sizes[order, column], kind="stable")]
        offset = 0
        while 2 * len(chunks) < steps - 1:
            mean = remaining / (steps - len(chunks))
            chunk = largest[offset : offset + 2 * ranks]
            chunk = chunk[free[chunk]][:ranks]
            if len(chunk) < ranks or sizes[chunk[0], column] <= LARGE * mean[column]:
                break
            level = np.maximum(sizes[chunk].max(0), mean)
            next_mean = (remaining - level) / (steps - len(chunks) - 1)
            if (next_mean < least).any():
                break
            alone = np.maximum(sizes[chunk], mean).mean(0)
            idle += float(((level - alone) / totals).sum()) / modalities
            chunks.append(chunk)
            levels.append(level)
            free[chunk] = False
            remaining = remaining - level
            offset += ranks
    if idle < WORTH_FILLING:
        return []
    extra = np.maximum(np.stack(levels) - remaining / (steps - len(chunks)), 0.0)
    large = np.concatenate(chunks)
    if features.shape[1] > modalities:
        slopes = _slopes(sizes, features[:, modalities:])
        extra_costs = extra @ slopes
        # A large sample may cost more than small ones with the same total of units.
        costs = features[large, modalities] - sizes[large] @ slopes[:, 0]
        extra_costs[:, 0] += np.maximum(costs.reshape(-1, ranks).max(1), 0.0)
        extra = np.concatenate([extra, extra_costs], axis=1)
    return [_LargeSamples(large, np.repeat(extra, ranks, axis=0))]


def _slopes(sizes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the (M, columns) least-squares slopes of others by sizes, rounded to be
    reproducible."""
    moments = [[float((a * b).sum()) for b in sizes.T] for a in sizes.T]
    products = [[float((a * b).sum()) for b in others.T] for a in sizes.T]
    slopes = np.linalg.lstsq(np.array(moments), np.array(products), rcond=1e-9)[0]
    return np.round(slopes, 6)


def _split_in_steps(
    samples: _Samples, ranks: int, steps: int, large: _LargeSamples, exact: bool,
    random: np.random.Generator,
) -> Groups | None:
    """Do :func:`split_into_groups` in ``steps`` steps or more; return None if ``exact`` and they do
    not suffice."""
    features, limits, size, order = samples
    n, count_large = len(order), len(large.samples)
    group_of = np.empty(n, np.int64)
    large_place = np.full(n, -1)
    large_place[large.samples] = np.arange(count_large)
    order = np.concatenate([large.samples, order[large_place[order] < 0]])
    pools, pool_steps = _pools(steps, ranks)
    slots = [_split_groups(amount, steps, random) for amount in (count_large, n - count_large)]
    sample_pool = np.minimum(np.concatenate(slots) // pool_steps, pools - 1)
    by_pool = np.argsort(sample_pool.astype(np.uint16 if pools <= 1 << 16 else np.int64),
                         kind="stable")
    stops = np.cumsum(np.bincount(sample_pool, minlength=pools))
    carried, first = np.zeros(0, np.int64), count_large
    for pool in range(pools):
        pool_samples = order[by_pool[stops[pool - 1] if pool else 0 : stops[pool]]]
        large_groups = large_place[pool_samples]
        large_groups = large_groups[large_groups >= 0]
        if len(carried):
            unplaced = np.concatenate([carried, pool_samples[len(large_groups) :]])
            unplaced = unplaced[np.argsort(-size[unplaced], kind="stable")]
            pool_samples = np.concatenate([pool_samples[: len(large_groups)], unplaced])
        count = pool_steps if pool < pools - 1 else steps - pool_steps * (pools - 1)
        extra = large.extra[large_groups]
        spilled = _level(features, pool_samples, limits, count * ranks, group_of, extra)
        if exact and spilled > (0 if pool == pools - 1 else n // steps):
            return None
        while pool == pools - 1 and spilled:
            count += max(1, spilled * count // (4 * len(pool_samples)))
            spilled = _level(features, pool_samples, limits, count * ranks, group_of, extra)
        placed = group_of[pool_samples] >= 0
        _fill_empty(group_of, pool_samples[placed], count * ranks)
        new = count * ranks - len(large_groups)
        numbers = np.concatenate([large_groups, first + np.arange(new)])
        group_of[pool_samples[placed]] = numbers[group_of[pool_samples[placed]]]
        first += new
        carried = pool_samples[~placed]
    return Groups(group_of, first, count_large)


def _pools(steps: int, ranks: int) -> tuple[int, int]:
    """Return the number of pools and of steps in each; the last pool also has the remaining
    steps."""
    few = steps * ranks <= MANY_GROUPS
    pool_steps = max(2, LARGE_POOL_GROUPS // ranks) if few else max(1, POOL_GROUPS // ranks)
    return max(1, steps // pool_steps), pool_steps


def _split_groups(n: int, slots: int, random: np.random.Generator) -> np.ndarray:
    """Return an (n,) slot for every place; every block of ``slots`` places has every slot once."""
    rounds = -(-n // slots)
    split_groups = np.broadcast_to(np.arange(slots), (rounds, slots))
    return random.permuted(split_groups, axis=1).ravel()[:n]


def _enough_steps(
    features: np.ndarray, limits: np.ndarray, order: np.ndarray, ranks: int, least: int,
    group_of: np.ndarray, random: np.random.Generator,
) -> int:
    """Return a number of steps with which nearly all samples of a trial pool find a group."""
    steps, n = least, len(order)
    while steps * ranks < n:
        pools, pool_steps = _pools(steps, ranks)
        if pools == 1:
            return steps  # the only pool adds steps itself
        trial = order[_split_groups(n, steps, random) < pool_steps]
        extra = _LargeSamples.none(features.shape[1]).extra
        spilled = _level(features, trial, limits, pool_steps * ranks, group_of, extra)
        if spilled <= SPILL * len(trial):
            return steps
        steps += max(1, spilled * steps // (4 * len(trial)))
    return steps


def _level(
    features: np.ndarray, order: np.ndarray, limits: np.ndarray, groups: int,
    group_of: np.ndarray, extra: np.ndarray,
) -> int:
    """Run :func:`level`. If samples find no group, :func:`make_room` for them, or else
    :func:`fill`."""
    spilled, first = level(features, order, limits, groups, group_of, extra), len(extra)
    if not 0 < spilled <= HOPELESS * len(order):
        return spilled
    spilled = make_room(features, order, limits, groups, group_of, first)
    if not spilled:
        return 0
    levelled = group_of[order]
    filled = fill(features, order, limits, groups, group_of, first)
    if 0 < filled <= HOPELESS * len(order):
        filled = make_room(features, order, limits, groups, group_of, first)
    if filled < spilled:
        return filled
    group_of[order] = levelled
    return spilled


def _fill_empty(group_of: np.ndarray, samples: np.ndarray, groups: int) -> None:
    """Give empty groups a sample from groups that have several."""
    counts = np.bincount(group_of[samples], minlength=groups)
    for empty in np.flatnonzero(counts == 0):
        giver = int(counts.argmax())
        if counts[giver] < 2:
            return
        group_of[samples[np.flatnonzero(group_of[samples] == giver)[-1]]] = empty
        counts[giver] -= 1
        counts[empty] += 1
