"""The least seconds of one stage: exact where the search comes to an end, else between bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from raymm.scheduler.multiplex.mapping import Placement, stage_seconds
from raymm.scheduler.multiplex.packing import FOUND, IMPOSSIBLE, pack
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.stage_bounds import StageBounds

# Placements that one call of the search tries, first to find something good, then to prove.
QUICK_NODES = 400
NODES = 20_000
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
        placements: those of ``seconds``.
        nodes: the effort that was allowed.
    """

    seconds: float
    bound: float
    placements: tuple[Placement, ...] = ()
    nodes: int = 0

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
        model = problem.interference
        self._coefficients = np.array([model.constant, model.additive, model.product])
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
            known = self.results[stage] = self._narrowed(stage, known, nodes)
        return known

    def known_bound(self, stage: int) -> float:
        """The best bound there is without a search."""
        known = self.results.get(stage)
        return self.bounds.bound(stage) if known is None else known.bound

    def forget(self) -> None:
        """Remember nothing."""
        self.results.clear()

    def offer(self, stage: int, placements: tuple[Placement, ...]) -> None:
        """Keep placements from elsewhere if they are the best of their stage so far."""
        seconds = stage_seconds(self.problem, placements)
        known = self.result(stage)
        if seconds < known.seconds:
            self.results[stage] = replace(known, seconds=seconds, placements=placements)

    def _evaluate(self, stage: int) -> StageResult:
        bound = self.bounds.bound(stage)
        if not np.isfinite(bound):
            return StageResult(np.inf, np.inf, (), self.nodes)
        found = self._first(stage, bound)
        return self._narrowed(stage, found, self.nodes)

    def _first(self, stage: int, bound: float) -> StageResult:
        """Some placements, by a binary search over the seconds at which options appear."""
        grid = self.bounds.grid
        low = int(np.searchsorted(grid, bound))
        high = len(grid)
        best = StageResult(np.inf, bound)
        step = 1
        # Upwards from the bound in growing strides until something is found, then between.
        at = low
        while at < high:
            found = self._search(stage, float(np.nextafter(grid[at], np.inf)), QUICK_NODES)
            if isinstance(found, StageResult):
                best = replace(found, bound=bound)
                break
            low = at + 1
            at = at + step if at + step < high else (high - 1 if at < high - 1 else high)
            step *= 2
        if not np.isfinite(best.seconds):
            found = self._search(stage, np.inf, 50 * self.nodes)
            if isinstance(found, StageResult):
                return replace(found, bound=bound)
            return StageResult(np.inf, np.inf if found == IMPOSSIBLE else bound, (), self.nodes)
        high = int(np.searchsorted(grid, best.seconds))
        while low < high:
            middle = (low + high) // 2
            found = self._search(stage, float(np.nextafter(grid[middle], np.inf)), QUICK_NODES)
            if isinstance(found, StageResult):
                best = replace(found, bound=bound)
                high = min(middle, int(np.searchsorted(grid, best.seconds)))
            else:
                low = middle + 1
        return best

    def _narrowed(self, stage: int, known: StageResult, nodes: int) -> StageResult:
        """Search below what is known until nothing is left or a search gives up; then raise the
        bound as far as it can be proven."""
        while not known.exact:
            found = self._search(stage, known.seconds * (1 - ROUNDING), nodes)
            if isinstance(found, StageResult):
                known = replace(found, bound=known.bound)
            elif found == IMPOSSIBLE:
                return replace(known, bound=known.seconds, nodes=nodes)
            else:
                break
        return replace(self._raised(stage, known, nodes), nodes=nodes)

    def _raised(self, stage: int, known: StageResult, nodes: int) -> StageResult:
        """Prove that some seconds below the known ones are not enough."""
        grid = self.bounds.grid
        low = int(np.searchsorted(grid, known.bound, side="right"))
        high = int(np.searchsorted(grid, known.seconds))
        while low < high and not known.exact:
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
        if self.stop is not None and self.stop():
            raise Interrupted
        problem, model = self.problem, self.problem.interference
        modules = list(bits(stage))
        limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
        outcome = IMPOSSIBLE
        for spread in (False, True):
            self.searches += 1
            outcome, _, chosen, gpus, content = pack(
                problem.seconds[modules], self._memory[modules], problem.bandwidth[modules],
                self.bounds.entry[modules], before, problem.gpus, problem.steps, limit,
                self._coefficients, model.coupling == "own", model.unit == "relative", spread,
                nodes,
            )
            if outcome == FOUND:
                return self._placed(modules, chosen, gpus, content)
            if outcome == IMPOSSIBLE:
                return IMPOSSIBLE
        return outcome

    def _placed(
        self, modules: list[int], chosen: np.ndarray, gpus: np.ndarray, content: np.ndarray
    ) -> StageResult:
        """Number the GPUs of all classes, those with most modules first."""
        sets: dict[int, list[int]] = {m: [] for m in modules}
        first = 0
        for c in sorted(range(len(gpus)), key=lambda c: (-int(content[c]).bit_count(), c)):
            for local in bits(int(content[c])):
                sets[modules[local]].extend(range(first, first + int(gpus[c])))
            first += int(gpus[c])
        placements = tuple(
            Placement(self.problem.names[m], tuple(sorted(sets[m])), int(chosen[i, 1]))
            for i, m in enumerate(modules)
        )
        return StageResult(stage_seconds(self.problem, placements), 0.0, placements)
