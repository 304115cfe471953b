"""The least seconds of one stage: exact where the search comes to an end, else between bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.packing import FOUND, IMPOSSIBLE
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


class Interrupted(Exception):
    """The caller's ``stop`` said so."""


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
        stop: called between searches; when it says True, :class:`Interrupted` is raised.
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
        known = self.results.get(stage)
        if known is None:
            known = self.results[stage] = self._evaluate(stage)
        return known

    def refined(self, stage: int, nodes: int) -> StageResult:
        """The same with more effort than before, if it was not exact already."""
        known = self.result(stage)
        if not known.exact and known.nodes < nodes:
            known = self._narrowed(stage, known, nodes)
            if not known.exact and stage.bit_count() >= LARGE:
                known = self._polished(stage, known, REPLACEMENTS[1], REPLACING_NODES[1])
                known = self._narrowed(stage, known, nodes)
            known = self.results[stage] = self._raised(stage, known, nodes)
        return known

    def probe(self, stage: int, below: float) -> StageResult:
        """What is known after asking only whether the stage takes less than ``below`` seconds.

        One search instead of many: ``seconds`` is below if placements were found, ``bound`` is at
        least that if there are none.
        """
        known = self.known(stage)
        if known.seconds < below or known.bound >= below:
            return known
        found = self._search(stage, below, max(self.nodes, known.nodes))
        if isinstance(found, StageResult):
            known = replace(found, bound=known.bound, nodes=known.nodes)
        elif found == IMPOSSIBLE:
            known = replace(known, bound=below)
        (self.results if stage in self.results else self._probed)[stage] = known
        return known

    def known(self, stage: int) -> StageResult:
        """What is known without a search."""
        known = self.results.get(stage) or self._probed.get(stage)
        return known or StageResult(np.inf, self.bounds.bound(stage))

    def known_bound(self, stage: int) -> float:
        """The best bound there is without a search."""
        return self.known(stage).bound

    def forget(self) -> None:
        """Remember nothing."""
        self.results.clear()
        self._probed.clear()

    def _evaluate(self, stage: int) -> StageResult:
        known = self.known(stage)
        if not np.isfinite(known.bound):
            return StageResult(np.inf, np.inf, None, self.nodes)
        if known.packing is None:
            self._ask_stop()
            modules = list(bits(stage))
            effort = SearchEffort(QUICK_NODES, self.nodes, LAST_RESORT * self.nodes, ROUNDING)
            seconds, bound, searches, packed = least_seconds(
                self._inputs(stage), self.bounds.grid, known.bound, effort
            )
            self.searches += searches
            packing = self._packing(modules, packed) if np.isfinite(seconds) else None
            found = StageResult(float(seconds), float(bound), packing, self.nodes)
        else:
            found = self._narrowed(stage, known, self.nodes)
        if not found.exact and stage.bit_count() >= LARGE:
            found = self._polished(stage, found, REPLACEMENTS[0], REPLACING_NODES[0])
            found = self._narrowed(stage, found, self.nodes)
        return found

    def _polished(
        self, stage: int, known: StageResult, replacements: int, nodes: int
    ) -> StageResult:
        """Placements that take less time, where the stage is too large to search completely."""
        if known.packing is not None and not known.exact:
            inputs = self._inputs(stage)
            effort = Repacking(RESTARTS, replacements, *REPLACED, PERTURBATION, ROUNDING, nodes)
            packed = repack(inputs, known.packing.packed, effort, stage % SEEDS)
            seconds = float(class_seconds(inputs, packed).max())
            if seconds < known.seconds:
                packing = self._packing(list(bits(stage)), packed)
                known = replace(known, seconds=seconds, packing=packing)
        return known

    def _narrowed(self, stage: int, known: StageResult, nodes: int) -> StageResult:
        """Search below what is known until nothing is left or a search gives up."""
        while np.isfinite(known.seconds) and not known.exact:
            found = self._search(stage, known.seconds * (1 - ROUNDING), nodes)
            if isinstance(found, StageResult):
                known = replace(found, bound=known.bound)
            elif found == IMPOSSIBLE:
                return replace(known, bound=known.seconds, nodes=nodes)
            else:
                break
        return replace(known, nodes=nodes)

    def _raised(self, stage: int, known: StageResult, nodes: int) -> StageResult:
        """Prove that some seconds below the known ones are not enough."""
        grid = self.bounds.grid
        low = int(np.searchsorted(grid, known.bound, side="right"))
        high = int(np.searchsorted(grid, known.seconds))
        while low < high and not known.exact and np.isfinite(known.seconds):
            middle = (low + high) // 2
            target = float(grid[middle])
            found = self._search(stage, target, nodes)
            if isinstance(found, StageResult):
                known = replace(found, bound=known.bound)
                high = min(middle, int(np.searchsorted(grid, known.seconds)))
            elif found == IMPOSSIBLE:
                known = replace(known, bound=max(known.bound, target))
                low = middle + 1
            else:
                high = middle
        return known

    def _search(self, stage: int, before: float, nodes: int) -> StageResult | int:
        """Placements done before the given seconds, or why there are none."""
        self._ask_stop()
        self.searches += 1
        outcome, seconds, packed = pack_either(self._inputs(stage), before, nodes)
        if outcome != FOUND:
            return outcome
        return StageResult(float(seconds), 0.0, self._packing(list(bits(stage)), packed))

    def _ask_stop(self) -> None:
        if self.stop is not None and self.stop():
            raise Interrupted

    def _inputs(self, stage: int) -> StageInputs:
        """The problem's part of the arguments of the searches."""
        known = self._inputs_of.get(stage)
        if known is None:
            problem, modules = self.problem, list(bits(stage))
            limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
            known = self._inputs_of[stage] = StageInputs(
                problem.seconds[modules], self._memory[modules], problem.bandwidth[modules],
                self.bounds.entry[modules], Pool(problem.gpus, problem.steps, limit, self._law),
            )
        return known

    def _packing(self, modules: list[int], packed: Packed) -> StagePacking:
        return StagePacking(tuple(self.problem.names[m] for m in modules), packed)
