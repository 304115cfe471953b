"""Encoders with another number of replicas than the LLM has data-parallel ranks.

With fewer replicas each serves as many neighbouring ranks: the groups of a step are placed so
that these sums are equal too. With more, several replicas share the units of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numba import njit

from raymm.scheduler.minibatch.metrics import group_sums
from raymm.scheduler.minibatch.problem import MiniBatchError, MiniBatchPlan, SampleSizes


def checked_serving(serving: Mapping[str, int], sizes: SampleSizes, ranks: int) -> None:
    """Raise MiniBatchError unless every number of replicas divides the ranks or the reverse."""
    for name, replicas in serving.items():
        sizes.column(name)
        if replicas < 1 or (ranks % replicas and replicas % ranks):
            raise MiniBatchError(
                f"serving[{name!r}] must divide the {ranks} ranks or be a multiple of them, got "
                f"{replicas}"
            )


def replica_loads(
    plan: MiniBatchPlan, sizes: SampleSizes, modality: str, replicas: int
) -> np.ndarray:
    """(steps, replicas) int64, units that every encoder replica computes.

    With fewer replicas than ranks, replica r serves ranks ``r * k`` to ``(r + 1) * k``. With
    more, replicas ``rank * k`` to ``(rank + 1) * k`` share a rank's units as :func:`shares` says.

    Raises:
        MiniBatchError: an unknown modality, or replicas and ranks do not divide each other.
    """
    checked_serving({modality: replicas}, sizes, plan.ranks)
    column = sizes.column(modality)
    sums = group_sums(plan, sizes.values[:, [column]])[:, :, 0]
    if replicas <= plan.ranks:
        return sums.reshape(plan.steps, replicas, -1).sum(2)
    edges = _edges(sums, replicas // plan.ranks)
    return np.diff(edges, axis=2).reshape(plan.steps, replicas)


def _edges(units: np.ndarray, parts: int) -> np.ndarray:
    return units[..., None] * np.arange(parts + 1) // parts


def shares(
    plan: MiniBatchPlan, sizes: SampleSizes, modality: str, replicas: int, step: int, rank: int
) -> list[list[tuple[int, int, int]]]:
    """Which units of a rank's samples each of its several encoder replicas encodes.

    Args:
        plan, sizes: as everywhere.
        modality: whose units can be encoded apart from each other, as image tiles.
        replicas: a multiple of the ranks.
        step, rank: which group.

    Returns:
        Per replica (sample, start, stop) for ranges of that sample's units, in the order of the
        group: equally many units for every replica, to within one.

    Raises:
        MiniBatchError: an unknown modality, or replicas are no multiple of the ranks.
    """
    checked_serving({modality: replicas}, sizes, plan.ranks)
    if replicas % plan.ranks:
        raise MiniBatchError(f"replicas must be a multiple of {plan.ranks} ranks, got {replicas}")
    column = sizes.column(modality)
    samples = plan.group(step, rank)
    stops = np.cumsum(sizes.values[samples, column])
    total = np.asarray(stops[-1] if len(stops) else 0)
    edges = _edges(total, replicas // plan.ranks).tolist()
    result = []
    for low, high in zip(edges, edges[1:], strict=False):
        ranges = []
        for sample, stop in zip(samples.tolist(), stops.tolist(), strict=True):
            start = stop - int(sizes.values[sample, column])
            if max(low, start) < min(high, stop):
                ranges.append((sample, max(low, start) - start, min(high, stop) - start))
        result.append(ranges)
    return result


def place(
    steps: np.ndarray, samples: np.ndarray, offsets: np.ndarray, sizes: SampleSizes,
    serving: Mapping[str, int],
) -> np.ndarray:
    """Groups of every step in an order that levels what encoder replicas with several ranks get.

    Args:
        steps: (steps, ranks) int64, groups.
        samples, offsets: of the groups, as in a plan.
        sizes: of all samples.
        serving: replicas per modality.

    Returns:
        (steps, ranks) int64, every row with the same groups.
    """
    ranks = steps.shape[1]
    checked_serving(serving, sizes, ranks)
    few = {name: replicas for name, replicas in serving.items() if 1 < replicas < ranks}
    if not few:
        return steps
    counts = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    loads = np.stack(
        [
            np.bincount(counts, sizes.values[samples, sizes.column(name)], len(offsets) - 1)
            for name in few
        ],
        1,
    )
    loads /= np.maximum(loads.mean(0), 1.0)
    served = np.array([ranks // replicas for replicas in few.values()])
    return _place(np.ascontiguousarray(steps), loads, served)


@njit(cache=True)
def _place(steps, loads, served):
    """Exchange two groups of a step as long as that lowers the sum of squares of replica loads."""
    result = steps.copy()
    ranks, columns = steps.shape[1], served.shape[0]
    sums = np.empty((columns, ranks))
    for step in range(steps.shape[0]):
        row = result[step]
        sums[:] = 0.0
        for rank in range(ranks):
            for c in range(columns):
                sums[c, rank // served[c]] += loads[row[rank], c]
        better = True
        while better:
            better = False
            for a in range(ranks):
                for b in range(a + 1, ranks):
                    change = 0.0
                    for c in range(columns):
                        p, q = a // served[c], b // served[c]
                        if p != q:
                            d = loads[row[b], c] - loads[row[a], c]
                            change += d * (sums[c, p] - sums[c, q] + d)
                    if change < -1e-12:
                        for c in range(columns):
                            d = loads[row[b], c] - loads[row[a], c]
                            sums[c, a // served[c]] += d
                            sums[c, b // served[c]] -= d
                        row[a], row[b] = row[b], row[a]
                        better = True
    return result
