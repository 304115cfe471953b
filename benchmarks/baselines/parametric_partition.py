"""Exact partitions of layers with additive costs, by a parametric search.

The bottlenecks equal those of the planner's dynamic programme
(:func:`raymm.scheduler.search.partition.partition_matrix`), which also supports costs of cuts and
stages that do not fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from raymm.scheduler.search.partition import Ranges, check_stages, prefix_sums


def partition_layers(costs: Sequence[float], stages: int) -> Ranges:
    """Split layers into ``stages`` non-empty stages with the least bottleneck. Return k ranges
    ``[lo, hi)`` that cover 0..n for n layers and k stages; costs may be in any unit.

    A probe tests a bottleneck B by filling stage after stage as far as B allows; bisection narrows
    B down. The result is exact for stage costs that are differences of prefix sums: costs are not
    negative and rounding is monotone, so another layer never makes a stage cheaper, which is all
    that the probe needs. Both ends of the bisection are costs of real stages. A feasible B is
    lowered to the bottleneck that it achieved, and an infeasible B is raised to the cheapest stage
    that the probe rejected, since nothing changes for any B below that. So the ends meet in the
    optimum.

    Among the optimal cuts, those nearest to an equal share of the remainder are chosen (filling
    every stage completely would leave the last ones nearly empty).

    Raises:
        NoPlanError: fewer layers than stages, or a cost that is negative or not finite.
    """
    prefix = prefix_sums(costs)
    num_layers = len(prefix) - 1
    check_stages(num_layers, stages)
    low = max(map(_difference, prefix[1:], prefix))
    high, fits, refused = _probe(prefix, stages, low)
    if not fits:
        low, high = refused, prefix[-1]
    while low < high:
        middle = low + (high - low) / 2
        if middle >= high:  # neighbouring floats
            middle = low
        achieved, fits, refused = _probe(prefix, stages, middle)
        if fits:
            high = achieved
        else:
            low = refused
    return _spread(prefix, stages, high)


def _difference(high: float, low: float) -> float:
    return high - low


def _reach(prefix: Sequence[float], start: int, bottleneck: float) -> int:
    """Return the largest end of a stage that starts at ``start`` and costs at most
    ``bottleneck``."""
    end = bisect_right(prefix, prefix[start] + bottleneck, start) - 1
    # This sum is rounded differently from the difference that defines a stage's cost.
    while prefix[end] - prefix[start] > bottleneck:
        end -= 1
    while end + 1 < len(prefix) and prefix[end + 1] - prefix[start] <= bottleneck:
        end += 1
    return end


def _probe(
    prefix: Sequence[float], stages: int, bottleneck: float
) -> tuple[float, bool, float]:
    """Return (largest stage cost used, True if all layers fit, cheapest rejected stage)."""
    last = len(prefix) - 1
    start, largest, refused = 0, 0.0, math.inf
    for _ in range(stages):
        end = _reach(prefix, start, bottleneck)
        largest = max(largest, prefix[end] - prefix[start])
        if end == last:
            return largest, True, refused
        refused = min(refused, prefix[end + 1] - prefix[start])
        start = end
    return largest, False, refused


def _spread(prefix: Sequence[float], stages: int, bottleneck: float) -> Ranges:
    """Return cuts within a feasible bottleneck, near equal shares."""
    num_layers = len(prefix) - 1
    # earliest[i]: first layer at which stage i may start so that the remaining layers fit.
    earliest = [num_layers] * (stages + 1)
    for index in range(stages - 1, 0, -1):
        end = earliest[index + 1]
        start = max(bisect_left(prefix, prefix[end] - bottleneck, 0, end), 0)
        while start > 0 and prefix[end] - prefix[start - 1] <= bottleneck:
            start -= 1
        while prefix[end] - prefix[start] > bottleneck:
            start += 1
        earliest[index] = start
    cuts = [0]
    for index in range(1, stages):
        start, left = cuts[-1], stages - index
        low = max(earliest[index], start + 1)
        high = min(_reach(prefix, start, bottleneck), num_layers - left)
        target = prefix[start] + (prefix[-1] - prefix[start]) / (left + 1)
        cut = min(max(bisect_left(prefix, target), low), high)
        if cut > low and target - prefix[cut - 1] < prefix[cut] - target:
            cut -= 1
        cuts.append(cut)
    return tuple(pairwise([*cuts, num_layers]))
