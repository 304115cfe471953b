"""How balanced a plan of mini-batches is: OmniBal's ratios, efficiency, mixing of data sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raymm.scheduler.minibatch.costs import CostModel, even_costs
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes


@dataclass(frozen=True)
class Balance:
    """Figures of one plan; 0 is best for ratios, 1 for efficiencies.

    Attributes:
        pad: per padded modality, padding over padded size, of all groups together (OmniBal
            eq. 1); 0 for packed plans.
        dist: per modality, mean over steps of eq. 2: what ranks lack of the largest.
        efficiency: mean over steps of mean rank cost over largest rank cost.
        step_efficiency: mean cost of a group over mean slot cost, where a pipeline of ``depth``
            microbatches in flight takes as long per slot as the costliest of these, over all
            ranks: lower if costs vary from step to step.
        average_batch: samples per group.
        groups, left_out: how many.
        mixing: mean over steps of the total-variation distance between the step's mix of data
            sets and that of all samples.
        random_mixing: the same if the samples were shuffled over the same groups.
    """

    pad: dict[str, float]
    dist: dict[str, float]
    efficiency: float
    step_efficiency: float
    average_batch: float
    groups: int
    left_out: int
    mixing: float
    random_mixing: float


def group_sums(plan: MiniBatchPlan, per_sample: np.ndarray) -> np.ndarray:
    """(N, C) numbers per sample to their (steps, ranks, C) sums per group."""
    chosen = per_sample[plan.samples]
    before = np.zeros((len(chosen) + 1, per_sample.shape[1]), per_sample.dtype)
    np.cumsum(chosen, axis=0, out=before[1:])
    sums = before[plan.offsets[1:]] - before[plan.offsets[:-1]]
    return sums.reshape(plan.steps, plan.ranks, -1)


def _largest(plan: MiniBatchPlan, values: np.ndarray) -> np.ndarray:
    """(steps, ranks) largest of every group, 0 for an empty one."""
    counts = np.diff(plan.offsets)
    result = np.zeros(plan.groups, values.dtype)
    full = counts > 0
    if full.any():
        result[full] = np.maximum.reduceat(values[plan.samples], plan.offsets[:-1][full])
    return result.reshape(plan.steps, plan.ranks)


def loads(plan: MiniBatchPlan, sizes: SampleSizes) -> np.ndarray:
    """(steps, ranks, M) int64, units every rank computes, padding included."""
    result = group_sums(plan, sizes.values)
    if not plan.packed:
        counts = np.diff(plan.offsets).reshape(plan.steps, plan.ranks)
        for name in sizes.padded:
            column = sizes.column(name)
            result[:, :, column] = _largest(plan, sizes.values[:, column]) * counts
    return result


def costs(plan: MiniBatchPlan, sizes: SampleSizes, model: CostModel) -> np.ndarray:
    """(steps, ranks, M) float64, cost of every rank and modality, padding included.

    Args:
        plan: the groups of an epoch.
        sizes: of all samples.
        model: of costs.
    """
    result = group_sums(plan, model.of_units(sizes.values))
    if not plan.packed:
        counts = np.diff(plan.offsets).reshape(plan.steps, plan.ranks)
        for name in sizes.padded:
            column = sizes.column(name)
            longest = np.zeros((plan.steps, plan.ranks, len(sizes.names)), np.int64)
            longest[:, :, column] = _largest(plan, sizes.values[:, column])
            result[:, :, column] = model.of_units(longest)[:, :, column] * counts
    return result


def pad_ratio(plan: MiniBatchPlan, sizes: SampleSizes) -> dict[str, float]:
    """Padding over padded size per padded modality (OmniBal eq. 1, summed over groups)."""
    used, paid = group_sums(plan, sizes.values), loads(plan, sizes)
    result = {}
    for name in sizes.padded:
        column = sizes.column(name)
        total = int(paid[:, :, column].sum())
        result[name] = 1.0 - int(used[:, :, column].sum()) / total if total else 0.0
    return result


def dist_ratio(rank_loads: np.ndarray) -> float:
    """(steps, ranks) loads to the mean over steps of what ranks lack of the largest, relative
    to it (OmniBal eq. 2). A step without load counts as balanced."""
    if not rank_loads.size:
        return 0.0
    largest = rank_loads.max(1)
    mean = rank_loads.mean(1)
    return float(np.mean(np.where(largest > 0, 1.0 - mean / np.maximum(largest, 1e-300), 0.0)))


def step_efficiency(rank_costs: np.ndarray, depth: int) -> float:
    """(steps, ranks) costs to the mean over the mean slot, of ``depth`` steps in flight."""
    if not rank_costs.size or not rank_costs.any():
        return 1.0
    slowest = rank_costs.max(1)
    # The pipeline fills and drains with fewer than depth in flight.
    padded = np.concatenate([slowest, np.zeros(depth - 1)])
    slots = np.lib.stride_tricks.sliding_window_view(padded, min(depth, len(padded))).max(1)
    return float(rank_costs.mean() / slots.mean())


def mixing(plan: MiniBatchPlan, sources: np.ndarray) -> float:
    """Mean over steps of the total-variation distance to the mix of all planned samples.

    Args:
        plan: the plan.
        sources: (N,) int64, data set of every sample.
    """
    mine = sources[plan.samples]
    kinds = int(mine.max(initial=0)) + 1
    step = np.repeat(np.arange(plan.groups) // plan.ranks, np.diff(plan.offsets))
    counts = np.bincount(step * kinds + mine, minlength=plan.steps * kinds)
    counts = counts.reshape(plan.steps, kinds)
    whole = np.bincount(mine, minlength=kinds) / max(len(mine), 1)
    of_step = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return float(np.abs(of_step - whole).sum(1).mean() / 2) if plan.steps else 0.0


def random_mixing(plan: MiniBatchPlan, sources: np.ndarray, seed: int = 0) -> float:
    """:func:`mixing` if the planned samples were shuffled over the same groups.

    Args:
        plan: the groups of an epoch.
        sources: (N,) data set of every sample.
        seed: of what is random.
    """
    shuffled = sources.copy()
    shuffled[plan.samples] = np.random.default_rng(seed).permutation(sources[plan.samples])
    return mixing(plan, shuffled)


def balance(
    plan: MiniBatchPlan, sizes: SampleSizes, model: CostModel | None = None, *, depth: int = 4
) -> Balance:
    """All figures of a plan.

    Args:
        plan: the plan.
        sizes: of all samples.
        model: costs; default: every modality costs the same over the whole data.
        depth: microbatches in flight in the pipeline, for ``step_efficiency``.
    """
    rank_loads = loads(plan, sizes)
    rank_costs = costs(plan, sizes, model or even_costs(sizes)).sum(2)
    return Balance(
        pad=pad_ratio(plan, sizes),
        dist={name: dist_ratio(rank_loads[:, :, m]) for m, name in enumerate(sizes.names)},
        efficiency=1.0 - dist_ratio(rank_costs),
        step_efficiency=step_efficiency(rank_costs, depth),
        average_batch=len(plan.samples) / plan.groups if plan.groups else 0.0,
        groups=plan.groups,
        left_out=len(plan.left_out),
        mixing=mixing(plan, sizes.sources),
        random_mixing=random_mixing(plan, sizes.sources),
    )
