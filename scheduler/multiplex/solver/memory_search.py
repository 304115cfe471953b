"""Branch and bound over degrees for mappings that fit in memory over an iteration.

The other searches limit memory within stages only. Their mapping is a lower bound for mappings that
also fit over the iteration, and often fits once the GPUs of stages are renumbered
(:func:`raymm.scheduler.multiplex.iteration_memory.balanced`). If it does not fit, some module must
use less memory of the pool, which with data parallelism requires another degree. Each branch
restricts one module to degrees with less memory than in the mapping, and is solved again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.multiplex.iteration_memory import (
    balanced,
    fits_iteration,
    iteration_memory,
    stage_memory,
)
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem

Allowed = tuple[tuple[int, ...], ...]
# Most mappings on the first descent to one that fits.
DIVE = 30
UNFIT = "; does not fit in memory over an iteration"


def fitted(
    problem: MappingProblem, mapping: Mapping, solve: Callable[[MappingProblem], Mapping],
    most: int, stop: Callable[[], bool],
) -> Mapping:
    """Return the best mapping found that fits over the iteration, with a lower bound. If none is
    found, return ``mapping`` itself, with a remark in ``method``.

    Args:
        problem: problem with ``memory_over`` = ``"iteration"``.
        solve: solves restricted problems, with memory limits within stages only.
        most: most mappings to solve after the first descent.
        stop: polled between mappings; if it returns True, the best mapping so far is returned.
    """
    search = _Branches(problem, solve)
    mapping = balanced(problem, mapping)
    if fits_iteration(problem, mapping):
        return mapping
    search.dive(mapping, stop)
    open_: list[tuple[float, int, Allowed | None, Mapping]] = [(mapping.bound, 0, None, mapping)]
    unresolved, count, solved = np.inf, 0, 0
    while open_ and solved < most and not stop():
        bound, _, allowed, mapped = heapq.heappop(open_)
        if search.best is not None and bound >= search.best.seconds:
            continue
        spent = search.footprint(mapped)
        if int(spent.sum()) <= problem.gpus * search.limit:
            # The total fits, so other mappings with the same degrees may fit.
            unresolved = min(unresolved, bound)
        for m in range(len(problem.names)):
            # Earlier branches cover less memory for earlier modules, so exclude that here.
            branch = search.less(allowed, m, int(spent[m]))
            for earlier in range(m):
                branch = search.at_least(branch, earlier, int(spent[earlier]))
            if branch is None or solved >= most or stop():
                unresolved = unresolved if branch is None else min(unresolved, bound)
                continue
            solution = search.solved(branch)
            if solution is None:
                continue
            solved += 1
            least = max(bound, solution.bound)
            if not search.offer(solution) and (
                search.best is None or least < search.best.seconds
            ):
                count += 1
                heapq.heappush(open_, (least, count, branch, solution))
            elif search.best is solution or fits_iteration(problem, solution):
                unresolved = min(unresolved, least)
    lower = min([unresolved, *(entry[0] for entry in open_)])
    if search.best is None:
        return replace(mapping, method=mapping.method + UNFIT)
    lower = min(max(lower, mapping.bound), search.best.seconds)
    return replace(
        search.best, bound=lower, method=mapping.method + ", memory over an iteration"
    )


class _Branches:
    """Restrictions of degrees, and the best mapping that fits."""

    def __init__(
        self, problem: MappingProblem, solve: Callable[[MappingProblem], Mapping]
    ) -> None:
        self.problem, self.solve = problem, solve
        self.best: Mapping | None = None
        degrees = np.array(problem.degrees)
        runs = np.isfinite(problem.seconds).any(2)
        # (M, J) bytes of the pool.
        self.bytes = np.where(runs, problem.memory * degrees, -1)
        self.least = np.where(runs, problem.seconds.min(2), np.inf)

    @property
    def limit(self) -> int:
        """Bytes per GPU; the problem must have a limit."""
        assert self.problem.memory_bytes is not None
        return self.problem.memory_bytes

    def footprint(self, mapping: Mapping) -> np.ndarray:
        result = np.zeros(len(self.problem.names), np.int64)
        for stage in mapping.stages:
            for placement in stage.placements:
                m = self.problem.names.index(placement.module)
                result[m] = self.bytes[m, len(placement.gpus).bit_length() - 1]
        return result

    def all(self) -> Allowed:
        return tuple(
            tuple(d for j, d in enumerate(self.problem.degrees) if row[j] >= 0)
            for row in self.bytes
        )

    def _only(
        self, allowed: Allowed | None, m: int, keep: Callable[[int], bool]
    ) -> Allowed | None:
        allowed = self.all() if allowed is None else allowed
        degrees = tuple(
            d for d in allowed[m] if keep(int(self.bytes[m, d.bit_length() - 1]))
        )
        return (*allowed[:m], degrees, *allowed[m + 1 :]) if degrees else None

    def less(self, allowed: Allowed | None, m: int, bytes_: int) -> Allowed | None:
        return self._only(allowed, m, lambda size: size < bytes_)

    def at_least(self, allowed: Allowed | None, m: int, bytes_: int) -> Allowed | None:
        return None if allowed is None else self._only(allowed, m, lambda size: size >= bytes_)

    def solved(
        self, allowed: Allowed, heavier: Collection[str] = (), factor: float = 1.0
    ) -> Mapping | None:
        """Return the best mapping of a branch, balanced; None if even the smallest degrees need too
        much memory. Modules in ``heavier`` count with ``factor`` times their bytes."""
        least = sum(
            min(int(self.bytes[m, d.bit_length() - 1]) for d in degrees)
            for m, degrees in enumerate(allowed)
        )
        if least > self.problem.gpus * self.limit:
            return None
        try:
            restricted = replace(
                self.problem, allowed=allowed, memory_over="stage", surfaces=tuple(
                    replace(s, memory_bytes=tuple(int(factor * b) for b in s.memory_bytes))
                    if s.name in heavier else s for s in self.problem.surfaces
                ),
            )
        except PlanError:
            return None
        return balanced(self.problem, self.solve(restricted))

    def offer(self, mapping: Mapping) -> bool:
        """Keep a mapping if it fits and is the best so far; return True if it fits."""
        if not fits_iteration(self.problem, mapping):
            return False
        if self.best is None or mapping.seconds < self.best.seconds:
            self.best = mapping
        return True

    def dive(self, mapping: Mapping, stop: Callable[[], bool]) -> None:
        """Find a first mapping that fits. Reduce the memory of the modules where that costs least
        time, until the total fits; then that of modules on the fullest GPU."""
        allowed, limit = self.all(), self.limit
        for _ in range(DIVE):
            spent = self.footprint(mapping)
            seconds = {
                self.problem.names.index(placement.module): stage.seconds
                for stage in mapping.stages for placement in stage.placements
            }
            used = iteration_memory(self.problem, mapping)
            full = max(range(len(used)), key=lambda g: used[g])
            modules = set(range(len(spent)))
            if spent.sum() <= self.problem.gpus * limit:
                if not stop():
                    solution = self._evened(allowed, mapping, used[full] - limit)
                    if solution is not None and self.offer(solution):
                        return
                # The total fits, so the modules on the fullest GPU must move.
                modules = {
                    self.problem.names.index(placement.module)
                    for stage in mapping.stages for placement in stage.placements
                    if full in placement.gpus
                }
            while True:
                m = self._cheapest(allowed, spent, modules, seconds)
                if m is None:
                    return
                fewer = self.less(allowed, m, int(spent[m]))
                assert fewer is not None  # _cheapest returned it
                allowed = fewer
                spent[m] = self._fastest(allowed, m)[1]
                if spent.sum() <= self.problem.gpus * limit:
                    break
            solution = None if stop() else self.solved(allowed)
            if solution is None or self.offer(solution):
                return
            mapping = solution

    def _evened(self, allowed: Allowed, mapping: Mapping, excess: int) -> Mapping | None:
        """Solve the branch again with heavier modules in the most uneven stage, so that they spread
        more."""
        loads = [stage_memory(self.problem, stage, mapping.gpus) for stage in mapping.stages]
        uneven = max(
            range(len(loads)), key=lambda s: max(loads[s]) - sum(loads[s]) / len(loads[s])
        )
        room = max(loads[uneven]) - excess
        if room < 1:
            return None
        names = [placement.module for placement in mapping.stages[uneven].placements]
        return self.solved(allowed, names, self.limit / room)

    def _fastest(self, allowed: Allowed, m: int) -> tuple[float, int]:
        return min(
            (float(self.least[m, d.bit_length() - 1]), int(self.bytes[m, d.bit_length() - 1]))
            for d in allowed[m]
        )

    def _cheapest(
        self, allowed: Allowed, spent: np.ndarray, some: Collection[int],
        seconds: dict[int, float],
    ) -> int | None:
        """Return the module of ``some`` that delays its stage least per byte saved, or that has
        most spare time if there is no delay."""
        best = None
        for m in sorted(some):
            fewer = self.less(allowed, m, int(spent[m]))
            if fewer is None:
                continue
            alone, size = self._fastest(fewer, m)
            longer = max(0.0, alone - seconds[m]) / (int(spent[m]) - size)
            if best is None or (longer, alone / seconds[m], m) < best:
                best = longer, alone / seconds[m], m
        return None if best is None else best[2]
