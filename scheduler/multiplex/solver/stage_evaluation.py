"""The least seconds of one stage: exact where the search comes to an end, else between bounds."""

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

# Placements that one call of the search tries, first to find something good, then to prove.
QUICK_NODES = 400
NODES = 4_000
# From this many modules on, a stage whose search gave up is worked on by placing a few again: new
# beginnings, tries to place some again since the last that helped, and how much the order varies.
LARGE = 8
RESTARTS = 8
REPLACEMENTS = (12, 300)
REPLACED = (2, 7)
REPLACING_NODES = (400, 1_500)
PERTURBATION = 0.5
SEEDS = 2**32
# Times that, where nothing was found at any seconds: memory leaves little room.
LAST_RESORT = 50
# A plan counts as better only if it is by this much, relatively: below it is rounding.
ROUNDING = 1e-11
NO_LIMIT = 2**62


@dataclass(frozen=True)
class StageResult:
    """What is known of one stage.

    Attributes:
        seconds: of the best placements found; infinite if none were.
        bound: no placements take fewer seconds; proven. Infinite: none exist.
        packing: that of ``seconds``, if there is one.
        nodes: the effort that was allowed.
    """

    seconds: float
    bound: float
    packing: StagePacking | None = None
    nodes: int = 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Those of ``seconds``."""
        return self.packing.placements if self.packing else ()

    @property
    def exact(self) -> bool:
        """Whether nothing is left between them."""
        return self.bound >= self.seconds * (1 - ROUNDING)


class StageEvaluator:
    """Evaluates stages, given as sets of modules (bits), and remembers the results.

    Args:
        problem: whose stages.
        nodes: placements that one search may try; more are exact more often.
        stop: called between searches; when it says True, :class:`KeyboardInterrupt` is raised.
    """

    def __init__(
        self, problem: MappingProblem, nodes: int = NODES,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.problem = problem
        self.nodes = nodes
        self.stop = stop
        self.bounds = StageBounds(problem)
        self.results: dict[int, StageResult] = {}
        self.searches = 0
        self._probed: dict[int, StageResult] = {}
        self._inputs_of: dict[int, StageInputs] = {}
        self._law = InterferenceLaw.of(problem.interference)
        self._memory = np.where(problem.memory < 0, NO_LIMIT, problem.memory)

    def result(self, stage: int) -> StageResult:
        """The least seconds of a stage, as well as ``nodes`` allow."""
        best = self.results.get(stage)
        if best is None:
            best = self.results[stage] = self._evaluate(stage)
        return best

    def refined(self, stage: int, nodes: int) -> StageResult:
        """The same with more effort than before, if it was not exact already."""
        best = self.result(stage)
        if not best.exact and best.nodes < nodes:
            best = self._narrowed(stage, best, nodes)
            if not best.exact and stage.bit_count() >= LARGE:
                best = self._polished(stage, best, REPLACEMENTS[1], REPLACING_NODES[1])
                best = self._narrowed(stage, best, nodes)
            best = self.results[stage] = self._raised(stage, best, nodes)
        return best

    def probe(self, stage: int, below: float) -> StageResult:
        """What is known after asking only whether the stage takes less than ``below`` seconds.

        One search instead of many: ``seconds`` is below if placements were found, ``bound`` is at
        least that if there are none.
        """
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
        """What is known without a search."""
        best = self.results.get(stage) or self._probed.get(stage)
        return best or StageResult(np.inf, self.bounds.bound(stage))

    def known_bound(self, stage: int) -> float:
        """The best bound there is without a search."""
        return self.best_known(stage).bound

    def forget(self) -> None:
        """Remember nothing."""
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
        """Placements that take less time, where the stage is too large to search completely."""
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
        """Search below what is known until nothing is left or a search gives up."""
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
        """Prove that some seconds below the known ones are not enough."""
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
        """Placements done before the given seconds, or why there are none."""
        self._ask_stop()
        self.searches += 1
        outcome, seconds, packed = pack_either(self._inputs(stage), before, nodes)
        if outcome != SOLVED:
            return outcome
        return StageResult(float(seconds), 0.0, self._packing(list(bits(stage)), packed))

    def _ask_stop(self) -> None:
        if self.stop is not None and self.stop():
            raise KeyboardInterrupt

    def _inputs(self, stage: int) -> StageInputs:
        """The problem's part of the arguments of the searches."""
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
