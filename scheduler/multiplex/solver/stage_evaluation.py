"""Least seconds of a stage: exact if the search completes, otherwise between bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.packing import IMPOSSIBLE, SOLVED
from raymm.scheduler.multiplex.solver.stage_bounds import StageBounds
from raymm.scheduler.multiplex.solver.stage_packing import (
    InterferenceLaw,
    Packed,
    Pool,
    StageInputs,
    StagePacking,
)
from raymm.scheduler.multiplex.solver.stage_search import (
    Repacking,
    SearchEffort,
    class_seconds,
    least_seconds,
    pack_either,
    repack,
)

# Placements that one search tries, first to find a good solution, then to prove it.
QUICK_NODES = 400
NODES = 4_000
# From this number of modules on, a stage whose search gave up is improved by repacking: restarts,
# tries since the last improvement, numbers of modules to repack, nodes per search, and variation of
# the order.
LARGE = 8
RESTARTS = 8
REPLACEMENTS = (12, 300)
REPLACED = (2, 7)
REPLACING_NODES = (400, 1_500)
PERTURBATION = 0.5
SEEDS = 2**32
# Factor of NODES if no placement was found at any seconds, because memory is tight.
LAST_RESORT = 50
# Relative improvements below this are rounding.
ROUNDING = 1e-11
NO_LIMIT = 2**62


@dataclass(frozen=True)
class StageResult:
    """Known results for one stage.

    Attributes:
        seconds: seconds of the best placements found; infinite if there are none.
        bound: proven lower bound; infinite if no placements exist.
        packing: placements that take ``seconds``, if any.
        nodes: effort that was allowed.
    """

    seconds: float
    bound: float
    packing: StagePacking | None = None
    nodes: int = 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.packing.placements if self.packing else ()

    @property
    def exact(self) -> bool:
        """True if ``seconds`` is proven to be optimal."""
        return self.bound >= self.seconds * (1 - ROUNDING)


class StageEvaluator:
    """Evaluator of stages, given as sets of modules (bits), with a cache of results.

    Args:
        nodes: placements that one search may try; more gives exact results more often.
    """

    def __init__(self, problem: MappingProblem, nodes: int = NODES) -> None:
        self.problem = problem
        self.nodes = nodes
        self._stop: Callable[[], bool] | None = None
        self.bounds = StageBounds(problem)
        self.results: dict[int, StageResult] = {}
        self.searches = 0
        self._probed: dict[int, StageResult] = {}
        self._inputs_of: dict[int, StageInputs] = {}
        self._law = InterferenceLaw.of(problem.interference)
        self._memory = np.where(problem.memory < 0, NO_LIMIT, problem.memory)

    def interrupt_if(self, stop: Callable[[], bool]) -> None:
        """Call ``stop`` between the following searches, and raise :class:`KeyboardInterrupt` if it
        returns True."""
        self._stop = stop

    def result(self, stage: int) -> StageResult:
        """Return the least seconds of a stage, as well as ``nodes`` allow."""
        best = self.results.get(stage)
        if best is None:
            best = self.results[stage] = self._evaluate(stage)
        return best

    def refined(self, stage: int, nodes: int) -> StageResult:
        """Return the result after more effort than before, unless it was already exact."""
        best = self.result(stage)
        if not best.exact and best.nodes < nodes:
            best = self._narrowed(stage, best, nodes)
            if not best.exact and stage.bit_count() >= LARGE:
                best = self._polished(stage, best, REPLACEMENTS[1], REPLACING_NODES[1])
                best = self._narrowed(stage, best, nodes)
            best = self.results[stage] = self._raised(stage, best, nodes)
        return best

    def probe(self, stage: int, below: float) -> StageResult:
        """Run a single search for placements that take less than ``below`` seconds, and return the
        best known result: ``seconds`` is less if there are any, else ``bound`` is at least
        ``below``."""
        best = self.best_known(stage)
        if best.seconds < below or best.bound >= below:
            return best
        outcome = self._search(stage, below, max(self.nodes, best.nodes))
        if isinstance(outcome, StageResult):
            best = replace(outcome, bound=best.bound, nodes=best.nodes)
        elif outcome == IMPOSSIBLE:
            best = replace(best, bound=below)
        (self.results if stage in self.results else self._probed)[stage] = best
        return best

    def best_known(self, stage: int) -> StageResult:
        """Return the best known result, without a search."""
        best = self.results.get(stage) or self._probed.get(stage)
        return best or StageResult(np.inf, self.bounds.bound(stage))

    def known_bound(self, stage: int) -> float:
        """Return the best bound that is known without a search."""
        return self.best_known(stage).bound

    def forget(self) -> None:
        self.results.clear()
        self._probed.clear()

    def _evaluate(self, stage: int) -> StageResult:
        best = self.best_known(stage)
        if not np.isfinite(best.bound):
            return StageResult(np.inf, np.inf, None, self.nodes)
        if best.packing is None:
            self._ask_stop()
            modules = list(bits(stage))
            effort = SearchEffort(QUICK_NODES, self.nodes, LAST_RESORT * self.nodes, ROUNDING)
            seconds, bound, searches, packed = least_seconds(
                self._inputs(stage), self.bounds.grid, best.bound, effort
            )
            self.searches += searches
            packing = self._packing(modules, packed) if np.isfinite(seconds) else None
            result = StageResult(float(seconds), float(bound), packing, self.nodes)
        else:
            result = self._narrowed(stage, best, self.nodes)
        if not result.exact and stage.bit_count() >= LARGE:
            result = self._polished(stage, result, REPLACEMENTS[0], REPLACING_NODES[0])
            result = self._narrowed(stage, result, self.nodes)
        return result

    def _polished(
        self, stage: int, best: StageResult, replacements: int, nodes: int
    ) -> StageResult:
        """Improve placements of a stage that is too large to search completely."""
        if best.packing is not None and not best.exact:
            inputs = self._inputs(stage)
            effort = Repacking(RESTARTS, replacements, *REPLACED, PERTURBATION, ROUNDING, nodes)
            packed = repack(inputs, best.packing.packed, effort, stage % SEEDS)
            seconds = float(class_seconds(inputs, packed).max())
            if seconds < best.seconds:
                packing = self._packing(list(bits(stage)), packed)
                best = replace(best, seconds=seconds, packing=packing)
        return best

    def _narrowed(self, stage: int, best: StageResult, nodes: int) -> StageResult:
        while np.isfinite(best.seconds) and not best.exact:
            outcome = self._search(stage, best.seconds * (1 - ROUNDING), nodes)
            if isinstance(outcome, StageResult):
                best = replace(outcome, bound=best.bound)
            elif outcome == IMPOSSIBLE:
                return replace(best, bound=best.seconds, nodes=nodes)
            else:
                break
        return replace(best, nodes=nodes)

    def _raised(self, stage: int, best: StageResult, nodes: int) -> StageResult:
        """Raise the bound by proving that lower seconds are impossible."""
        grid = self.bounds.grid
        low = int(np.searchsorted(grid, best.bound, side="right"))
        high = int(np.searchsorted(grid, best.seconds))
        while low < high and not best.exact and np.isfinite(best.seconds):
            middle = (low + high) // 2
            target = float(grid[middle])
            outcome = self._search(stage, target, nodes)
            if isinstance(outcome, StageResult):
                best = replace(outcome, bound=best.bound)
                high = min(middle, int(np.searchsorted(grid, best.seconds)))
            elif outcome == IMPOSSIBLE:
                best = replace(best, bound=max(best.bound, target))
                low = middle + 1
            else:
                high = middle
        return best

    def _search(self, stage: int, before: float, nodes: int) -> StageResult | int:
        self._ask_stop()
        self.searches += 1
        outcome, seconds, packed = pack_either(self._inputs(stage), before, nodes)
        if outcome != SOLVED:
            return outcome
        return StageResult(float(seconds), 0.0, self._packing(list(bits(stage)), packed))

    def _ask_stop(self) -> None:
        if self._stop is not None and self._stop():
            raise KeyboardInterrupt

    def _inputs(self, stage: int) -> StageInputs:
        inputs = self._inputs_of.get(stage)
        if inputs is None:
            problem, modules = self.problem, list(bits(stage))
            limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
            inputs = self._inputs_of[stage] = StageInputs(
                problem.seconds[modules], self._memory[modules], problem.bandwidth[modules],
                self.bounds.entry[modules], Pool(problem.gpus, problem.steps, limit, self._law),
            )
        return inputs

    def _packing(self, modules: list[int], packed: Packed) -> StagePacking:
        return StagePacking(tuple(self.problem.names[m] for m in modules), packed)
