"""Mappings of the same modules by Megatron-LM, DistMM and Spindle (Mosaic §2.2).

All of them give a GPU to one module at a time, so there is no interference. Degrees are powers of
two, as for all mappings. Costs of Spindle's synchronization between slices are left out, in its
favour.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping as ByName
from collections.abc import Sequence

import numpy as np

from benchmarks.baselines.baseline import Baseline
from raymm.errors import PlanError
from raymm.scheduler.graph.strict_json import whole
from raymm.scheduler.multiplex.mapping import (
    Mapping,
    MultiplexStage,
    Placement,
    predicted_stage,
)
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.exact import alone_in_slot

SPINDLE_SLICES = 24


def megatron(problem: MappingProblem) -> Mapping:
    """Run every module over all GPUs, one after the other (the largest power of two of them)."""
    stages = []
    for stage in alone_in_slot(problem):
        m = stage.bit_length() - 1
        runs = np.flatnonzero(np.isfinite(_whole(problem)[m]))
        if not len(runs):
            raise PlanError(_needs_whole(problem, m))
        degree = problem.degrees[int(runs[-1])]
        stages.append(predicted_stage(
            problem, [Placement(problem.names[m], tuple(range(degree)), problem.steps)]
        ))
    return Mapping(problem.gpus, problem.steps, tuple(stages), 0.0, "Megatron-LM")


def distmm(problem: MappingProblem) -> Mapping:
    """Run modules of a level concurrently on disjoint GPUs, with the slowest as fast as possible.

    A level with more modules than the GPUs can hold is cut into as few groups as possible, of
    modules of similar length, which run in turn.
    """
    stages: list[MultiplexStage] = []
    for level in problem.levels:
        modules = sorted(bits(level), key=lambda m: (-_whole(problem)[m].min(), m))
        for groups in range(1, len(modules) + 1):
            cuts = [round(i * len(modules) / groups) for i in range(groups + 1)]
            cut_stages = [
                _concurrently(problem, modules[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)
            ]
            complete = [stage for stage in cut_stages if stage is not None]
            if len(complete) == groups:
                stages += complete
                break
        else:
            raise PlanError(_needs_whole(problem, modules[0]))
    return Mapping(problem.gpus, problem.steps, tuple(stages), 0.0, "DistMM")


def spindle(
    problem: MappingProblem, slices: int = SPINDLE_SLICES, layers: ByName[str, int] | None = None
) -> Mapping:
    """Map waves of slices.

    Every module's work is cut into slices, and each wave gives whole GPUs to some modules for as
    many slices as fit into its duration.

    A slice is a number of consecutive layers of a module, so there are at most as many slices as
    layers (in Spindle, a slice is a part of a chain of equal operators); a module of four layers
    can be cut in three places.

    Per level, C is the time in which all modules could end together if GPUs were divisible. Each
    module gets slices at the two degrees around its share, so that they add up to C. Waves are then
    filled with the longest remaining work, remaining GPUs are assigned to the module with the
    largest gain, and a wave ends with the first module that ends.

    Args:
        slices: slices of every module whose layers are unknown.

    Raises:
        PlanError: slices or layers below 1, or a module that fits no whole GPU.
    """
    whole(slices, "slices", 1)
    parts = [slices if layers is None else layers.get(name, slices) for name in problem.names]
    for name, count in zip(problem.names, parts, strict=True):
        whole(count, f"layers of {name}", 1)
    slices = math.lcm(*parts)
    units = [slices // count for count in parts]
    stages: list[MultiplexStage] = []
    for level in problem.levels:
        stages += _waves(problem, list(bits(level)), slices, units)
    return Mapping(problem.gpus, problem.steps, tuple(stages), 0.0, "Spindle", slices)


def _whole(problem: MappingProblem) -> np.ndarray:
    """Return (M, J) seconds with whole GPUs, by module and log2 of the degree."""
    return problem.seconds[:, :, problem.steps]


def _needs_whole(problem: MappingProblem, m: int) -> str:
    return (
        f"{problem.names[m]} has no seconds at quota {problem.steps} of {problem.steps}; baselines "
        "give whole GPUs, so its surface must be sampled there"
    )


def _concurrently(problem: MappingProblem, modules: list[int]) -> MultiplexStage | None:
    """Assign whole GPUs so that the slowest module is fastest; None for too many modules.

    The result has the least time at which the smallest sufficient degrees fit.
    """
    seconds = _whole(problem)[modules]
    degrees = np.array(problem.degrees)
    for limit in np.unique(seconds[np.isfinite(seconds)]):
        fast = seconds <= limit
        if fast.any(1).all() and degrees[fast.argmax(1)].sum() <= problem.gpus:
            return predicted_stage(
                problem, _placed(problem, modules, [int(d) for d in degrees[fast.argmax(1)]])
            )
    return None


def _placed(
    problem: MappingProblem, modules: Sequence[int], degrees: Sequence[int],
    slices: Sequence[int] | None = None,
) -> list[Placement]:
    """Place modules on disjoint whole GPUs, one after the other."""
    result, first = [], 0
    for i, (m, degree) in enumerate(zip(modules, degrees, strict=True)):
        gpus = tuple(range(first, first + degree))
        count = 1 if slices is None else slices[i]
        result.append(Placement(problem.names[m], gpus, problem.steps, count))
        first += degree
    return result


def _divisible(problem: MappingProblem, modules: list[int]) -> dict[int, float]:
    """Return shares of divisible GPUs with which all modules end at the same time."""
    log_degrees = np.log2(np.array(problem.degrees))

    def share(m: int, limit: float) -> float:
        # Smallest degree that is done by then, log-linear between powers of two.
        times = np.minimum.accumulate(_whole(problem)[m])
        runs = np.isfinite(times)
        x, y = log_degrees[runs], np.log(times[runs])
        if limit >= np.exp(y[0]):
            # The remaining time is less than one replica's: treat the GPU as time-shared.
            return float(2 ** x[0] * np.exp(y[0]) / limit)
        if limit < np.exp(y[-1]):
            return math.inf
        return float(2 ** np.interp(-np.log(limit), -y, x))

    low = max(float(np.min(_whole(problem)[m])) for m in modules)
    high = sum(float(_whole(problem)[m][np.isfinite(_whole(problem)[m])].max()) for m in modules)
    for _ in range(60):
        middle = math.sqrt(low * high)
        if sum(share(m, middle) for m in modules) <= problem.gpus:
            high = middle
        else:
            low = middle
    return {m: share(m, high) for m in modules}


def _waves(
    problem: MappingProblem, modules: list[int], slices: int, units: Sequence[int]
) -> list[MultiplexStage]:
    seconds = _whole(problem)
    for m in modules:
        if not np.isfinite(seconds[m]).any():
            raise PlanError(_needs_whole(problem, m))
    shares = _divisible(problem, modules)
    # (module, index of the degree) -> remaining slices.
    left: dict[tuple[int, int], int] = {}
    for m in modules:
        runs = [int(j) for j in np.flatnonzero(np.isfinite(seconds[m]))]
        lower = max((j for j in runs if problem.degrees[j] <= shares[m]), default=runs[0])
        upper = next((j for j in runs if problem.degrees[j] >= shares[m]), runs[-1])
        part = 0.0
        if upper != lower:
            part = (shares[m] - problem.degrees[lower]) / (
                problem.degrees[upper] - problem.degrees[lower]
            )
        above = round(slices // units[m] * part) * units[m]
        left[m, lower] = slices - above
        if above:
            left[m, upper] = left.get((m, upper), 0) + above
    left = {key: count for key, count in left.items() if count}
    stages = []
    while left:
        stages.append(_wave(problem, left, slices, units))
    return stages


def _wave(
    problem: MappingProblem, left: dict[tuple[int, int], int], slices: int, units: Sequence[int]
) -> MultiplexStage:
    """Fill the GPUs with the longest remaining work and remove it from ``left``."""
    seconds = _whole(problem)
    queue = [(-seconds[m, j] * count, m, j) for (m, j), count in left.items()]
    heapq.heapify(queue)
    chosen: dict[int, int] = {}
    free = problem.gpus
    while queue:
        _, m, j = heapq.heappop(queue)
        if m not in chosen and problem.degrees[j] <= free:
            chosen[m] = j
            free -= problem.degrees[j]
    degree = dict(chosen)
    while True:
        # Double the degree of the module that saves the most time by it.
        gains = []
        for m, j in degree.items():
            wider = j + 1 < len(problem.degrees) and problem.degrees[j] <= free
            if wider and seconds[m, j + 1] < seconds[m, j]:
                count = left[m, chosen[m]]
                gains.append(((seconds[m, j] - seconds[m, j + 1]) * count, m))
        if not gains:
            break
        m = max(gains)[1]
        free -= problem.degrees[degree[m]]
        degree[m] += 1
    slice_seconds = {m: seconds[m, j] / slices for m, j in degree.items()}
    span = min(slice_seconds[m] * left[m, chosen[m]] for m in chosen)
    span = max(span, max(seconds * units[m] for m, seconds in slice_seconds.items()))
    counts = []
    for m, j in chosen.items():
        layers = max(1, int(span / (slice_seconds[m] * units[m]) * (1 + 1e-9)))
        count = min(left[m, j], layers * units[m])
        counts.append(count)
        left[m, j] -= count
        if not left[m, j]:
            del left[m, j]
    modules = list(chosen)
    placements = _placed(problem, modules, [problem.degrees[degree[m]] for m in modules], counts)
    return predicted_stage(problem, placements, slices)


MAPPINGS: tuple[Baseline[MappingProblem, Mapping], ...] = (
    Baseline("Megatron-LM", "every module over all GPUs, in turn", megatron),
    Baseline("DistMM", "modules side by side on whole GPUs", distmm),
    Baseline("Spindle", "waves of slices of modules", spindle),
)
