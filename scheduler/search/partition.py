"""Exact partitions of contiguous layers into stages, and simple baselines.

The objective is the bottleneck, the cost of the slowest stage (Cornstarch v2 §3.1).
:func:`partition_matrix`, the dynamic programme of Cornstarch v2 eq. 5-6, supports cuts with a cost
and stages that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from raymm.errors import NoPlanError

Ranges = tuple[tuple[int, int], ...]
"""Layers of each stage: first, and one past the last."""

Feasible = Callable[[int, int, int], bool]
"""``feasible(index, lo, hi)`` returns True if stage ``index`` may hold the layers ``[lo, hi)``."""


def cost_matrix(
    costs: Sequence[float] | np.ndarray, cut_costs: Sequence[float] | None = None
) -> np.ndarray:
    """Return the (n + 1, n + 1) float64 cost of every possible stage, including costs of cuts:
    entry (lo, hi) for the layers ``[lo, hi)``; ``inf`` where ``hi <= lo``.

    Args:
        costs: cost of each layer (n of them), e.g. seconds of 1F + 1B.
        cut_costs: n numbers; entry i is the cost (communication) of a cut before layer i for each
            of the two adjacent stages. Entry 0 is not used.

    Raises:
        NoPlanError: a cost is negative or not finite.
    """
    prefix = np.array(prefix_sums(costs))
    num_layers = len(prefix) - 1
    matrix = prefix[None, :] - prefix[:, None]
    if cut_costs is not None:
        if len(cut_costs) != num_layers:
            raise NoPlanError(
                f"cut_costs has {len(cut_costs)} entries; it needs one per layer ({num_layers})"
            )
        _check_costs("cut_costs", cut_costs[1:])
        at_cut = np.array([0.0, *cut_costs[1:], 0.0])
        matrix = matrix + at_cut[:, None] + at_cut[None, :]
    matrix[np.tril_indices(num_layers + 1)] = np.inf
    return matrix


def partition_matrix(
    matrix: np.ndarray, stages: int, feasible: Feasible | np.ndarray | None = None
) -> Ranges:
    """Run the dynamic programme (Cornstarch v2 eq. 5-6) over costs of whole stages. Return k ranges
    ``[lo, hi)`` with the least bottleneck, and among those the least sum of squared stage costs.

    Args:
        matrix: (n + 1, n + 1); entry (lo, hi) is the cost of a stage with the layers ``[lo, hi)``,
            not negative; ``inf`` forbids the stage. Only ``hi > lo`` is read. Alternatively (k, n +
            1, n + 1), with costs that depend on the stage's index.
        feasible: ``feasible(index, lo, hi) -> bool``, or a (k, n + 1, n + 1) bool array: True if
            stage ``index`` may hold these layers. The index matters because with 1F1B, earlier
            stages hold activations of more microbatches.

    Raises:
        NoPlanError: fewer layers than stages, or no feasible partition.
    """
    matrix = np.asarray(matrix, dtype=float)
    num_layers = matrix.shape[-1] - 1
    check_stages(num_layers, stages)
    per_stage = _allowed_costs(matrix, stages, feasible)

    # Eq. 5-6: best[i] is the least bottleneck of layers [0, i) in the stages so far.
    best = per_stage[0][0]
    for cost in per_stage[1:]:
        best = np.maximum(best[:, None], cost).min(axis=0)
    bottleneck = best[num_layers]
    if not np.isfinite(bottleneck):
        raise NoPlanError(
            f"no partition of {num_layers} layers into {stages} stages is feasible"
        )

    # Repeat with sums of squares, over stages within the bottleneck. Costs are relative to the
    # bottleneck, so that squares neither overflow nor underflow.
    squares = []
    for cost in per_stage:
        within = cost <= bottleneck
        square = np.full(cost.shape, np.inf)
        square[within] = (cost[within] / bottleneck) ** 2 if bottleneck > 0 else 0.0
        squares.append(square)
    total = squares[0][0]
    choices = []
    for square in squares[1:]:
        sums = total[:, None] + square
        choice = sums.argmin(axis=0)
        choices.append(choice)
        total = sums[choice, np.arange(num_layers + 1)]
    cuts = [num_layers]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    return tuple(pairwise(cuts))


def least_bottlenecks(matrix: np.ndarray) -> np.ndarray:
    """Return the (n,) least bottlenecks of n layers in 1, 2, ... n stages. ``matrix`` is (n + 1, n
    + 1) as in :func:`partition_matrix`."""
    size = len(matrix)
    matrix = np.where(np.tri(size, dtype=bool), np.inf, matrix)
    reach, least = matrix[0], []
    for _ in range(size - 1):
        least.append(reach[-1])
        reach = np.maximum(reach[:, None], matrix).min(axis=0)
    return np.array(least)


def _allowed_costs(
    matrix: np.ndarray, stages: int, feasible: Feasible | np.ndarray | None
) -> list[np.ndarray]:
    """Return the matrix of each stage index, with ``inf`` where the stage is not allowed."""
    size = matrix.shape[-1]
    matrix = np.where(np.tri(size, dtype=bool), np.inf, matrix)
    if np.isnan(matrix).any() or (matrix < 0).any():
        raise NoPlanError("the cost of a stage is negative or not a number")
    matrices = list(np.broadcast_to(matrix, (stages, size, size)))
    if feasible is None:
        return matrices
    if callable(feasible):
        function, feasible = feasible, np.zeros((stages, size, size), dtype=bool)
        for index in range(stages):
            first, last = index == 0, index == stages - 1
            # Other stages hold at least one layer each, so not every range can occur.
            for lo in range(index, 1 if first else size - stages + index):
                ends = [size - 1] if last else range(lo + 1, size - stages + index + 1)
                for hi in ends:
                    feasible[index, lo, hi] = function(index, lo, hi)
    elif np.shape(feasible) != (stages, size, size):
        raise NoPlanError(
            f"feasible has the shape {np.shape(feasible)}; it must be {(stages, size, size)}"
        )
    return [
        np.where(allowed, costs, np.inf)
        for allowed, costs in zip(feasible, matrices, strict=True)
    ]


def even_layers(num_layers: int, stages: int) -> Ranges:
    """Return the baseline with equally many layers per stage, one more on the first ones if needed;
    raise ``NoPlanError`` if there are fewer layers than stages."""
    check_stages(num_layers, stages)
    size, more = divmod(num_layers, stages)
    cuts = [size * index + min(index, more) for index in range(stages + 1)]
    return tuple(pairwise(cuts))


def prefix_sums(costs: Sequence[float] | np.ndarray) -> list[float]:
    """Return 0 and the sums of the first 1, 2, ... n costs; raise ``NoPlanError`` for a cost that
    is negative or not finite, and if their sum is not finite."""
    _check_costs("costs", costs)
    prefix = list(accumulate(map(float, costs), initial=0.0))
    if math.isinf(prefix[-1]):
        raise NoPlanError("costs: their sum is not finite")
    return prefix


def _check_costs(name: str, costs: Sequence[float] | np.ndarray) -> None:
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:  # written so that NaN fails too
            raise NoPlanError(
                f"{name}: the entry for layer {layer} is {cost}; it must be finite and at least 0"
            )


def check_stages(num_layers: int, stages: int) -> None:
    """Raise ``NoPlanError`` unless every stage can have a layer."""
    if not 1 <= stages <= num_layers:
        raise NoPlanError(
            f"stages is {stages}; {num_layers} layers allow 1..{num_layers} (none may be empty)"
        )
