"""Metrics of a plan of mini-batches: OmniBal's ratios, efficiency, mixing of data sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raymm.scheduler.minibatch.costs import CostModel, even_costs
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes


@dataclass(frozen=True)
class Balance:
    """Metrics of one plan; 0 is best for ratios, 1 for efficiencies.

    Attributes:
        pad: padding over padded size of all groups together, per padded modality (OmniBal eq. 1); 0
            for packed plans.
        dist: per modality, mean over steps of eq. 2: distance of the mean rank from the largest.
        efficiency: mean over steps of mean rank cost over largest rank cost.
        step_efficiency: mean group cost over mean slot cost. A slot of a pipeline with ``depth``
            microbatches in flight takes as long as the costliest of them over all ranks, so this is
            lower if costs vary from step to step.
        groups, left_out: number of groups, and of unused samples.
        mixing: mean over steps of the total-variation distance between the step's mix of data sets
            and that of all samples.
        random_mixing: ``mixing`` if the samples were shuffled over the same groups.
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
    """Return the (steps, ranks, C) sums per group of (N, C) numbers per sample."""
    chosen = per_sample[plan.samples]
    cumulative = np.zeros((len(chosen) + 1, per_sample.shape[1]), per_sample.dtype)
    np.cumsum(chosen, axis=0, out=cumulative[1:])
    sums = cumulative[plan.offsets[1:]] - cumulative[plan.offsets[:-1]]
    return sums.reshape(plan.steps, plan.ranks, -1)


def _largest(plan: MiniBatchPlan, values: np.ndarray) -> np.ndarray:
    """Return the (steps, ranks) largest value of every group, 0 for an empty one."""
    counts = np.diff(plan.offsets)
    result = np.zeros(plan.groups, values.dtype)
    full = counts > 0
    if full.any():
        result[full] = np.maximum.reduceat(values[plan.samples], plan.offsets[:-1][full])
    return result.reshape(plan.steps, plan.ranks)


def loads(plan: MiniBatchPlan, sizes: SampleSizes) -> np.ndarray:
    """Return the (steps, ranks, M) int64 units that every rank computes, including padding."""
    result = group_sums(plan, sizes.values)
    if not plan.packed:
        counts = np.diff(plan.offsets).reshape(plan.steps, plan.ranks)
        for name in sizes.padded:
            column = sizes.column(name)
            result[:, :, column] = _largest(plan, sizes.values[:, column]) * counts
    return result


def costs(plan: MiniBatchPlan, sizes: SampleSizes, model: CostModel) -> np.ndarray:
    """Return the (steps, ranks, M) float64 cost of every rank and modality, including padding."""
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
    """Return padding over padded size per padded modality (OmniBal eq. 1, summed over groups)."""
    used, paid = group_sums(plan, sizes.values), loads(plan, sizes)
    result = {}
    for name in sizes.padded:
        column = sizes.column(name)
        total = int(paid[:, :, column].sum())
        result[name] = 1.0 - int(used[:, :, column].sum()) / total if total else 0.0
    return result


def dist_ratio(rank_loads: np.ndarray) -> float:
    """Return the mean over steps of the relative distance between mean and largest of (steps,
    ranks) loads (OmniBal eq. 2); 0 for a step without load."""
    if not rank_loads.size:
        return 0.0
    largest = rank_loads.max(1)
    mean = rank_loads.mean(1)
    return float(np.mean(np.where(largest > 0, 1.0 - mean / np.maximum(largest, 1e-300), 0.0)))


def step_efficiency(rank_costs: np.ndarray, depth: int) -> float:
    """Return the mean of (steps, ranks) costs over the mean slot, with ``depth`` steps in
    flight."""
    if not rank_costs.size or not rank_costs.any():
        return 1.0
    slowest = rank_costs.max(1)
    # While the pipeline fills and drains, fewer than `depth` steps are in flight.
    padded = np.concatenate([slowest, np.zeros(depth - 1)])
    slots = np.lib.stride_tricks.sliding_window_view(padded, min(depth, len(padded))).max(1)
    return float(rank_costs.mean() / slots.mean())


def mixing(plan: MiniBatchPlan, sources: np.ndarray) -> float:
    """Return the mean over steps of the total-variation distance to the mix of all planned samples.
    ``sources`` is the (N,) int64 data set of every sample."""
    sample_sources = sources[plan.samples]
    kinds = int(sample_sources.max(initial=0)) + 1
    step = np.repeat(np.arange(plan.groups) // plan.ranks, np.diff(plan.offsets))
    counts = np.bincount(step * kinds + sample_sources, minlength=plan.steps * kinds)
    counts = counts.reshape(plan.steps, kinds)
    overall = np.bincount(sample_sources, minlength=kinds) / max(len(sample_sources), 1)
    step_mix = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return float(np.abs(step_mix - overall).sum(1).mean() / 2) if plan.steps else 0.0


def random_mixing(plan: MiniBatchPlan, sources: np.ndarray, seed: int = 0) -> float:
    """Return :func:`mixing` if the planned samples were shuffled over the same groups."""
    shuffled = sources.copy()
    shuffled[plan.samples] = np.random.default_rng(seed).permutation(sources[plan.samples])
    return mixing(plan, shuffled)


def balance(
    plan: MiniBatchPlan, sizes: SampleSizes, model: CostModel | None = None, *, depth: int = 4
) -> Balance:
    """Return all metrics of a plan. ``model`` makes every modality cost the same by default;
    ``depth`` is the number of microbatches in flight, for ``step_efficiency``."""
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
