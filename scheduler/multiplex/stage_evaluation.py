"""The least seconds of one stage: exact where the search comes to an end, else between bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.packing import FOUND, IMPOSSIBLE, pack
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.repacking import class_seconds, repack
from raymm.scheduler.multiplex.stage_bounds import StageBounds

# Placements that one call of the search tries, first to find something good, then to prove.
QUICK_NODES = 400
NODES = 2_000
# From this many modules on, a stage whose search gave up is worked on by placing a few again: new
# beginnings, tries to place some again since the last that helped, and how much the order varies.
LARGE = 5
RESTARTS = 8
REPLACEMENTS = (12, 300)
REPLACED = (2, 7)
REPLACING_NODES = (400, 1_500)
JITTER = 0.5
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
        self._probed: dict[int, StageResult] = {}
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
            if stage.bit_count() >= LARGE:
                known = self._polished(stage, known, REPLACEMENTS[1], REPLACING_NODES[1])
            known = self._narrowed(stage, known, nodes)
            known = self.results[stage] = self._raised(stage, known, nodes)
        return known

    def offer(self, stage: int, found: StageResult) -> None:
        """Keep what was found elsewhere where it is better than what is known."""
        known = self.result(stage)
        if found.seconds < known.seconds:
            known = replace(known, seconds=found.seconds, placements=found.placements)
        self.results[stage] = replace(known, bound=max(known.bound, found.bound))

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
            return StageResult(np.inf, np.inf, (), self.nodes)
        if stage.bit_count() < LARGE:
            found = self._between(stage, self._first(stage, known))
        else:
            found = self._first(stage, known)
            found = self._polished(stage, found, REPLACEMENTS[0], REPLACING_NODES[0])
        return self._narrowed(stage, found, self.nodes)

    def _first(self, stage: int, best: StageResult) -> StageResult:
        """Some placements: upwards from the bound in growing strides until something is found."""
        grid, bound = self.bounds.grid, best.bound
        at, stride = int(np.searchsorted(grid, bound)), 1
        while not np.isfinite(best.seconds) and at < len(grid):
            found = self._search(stage, float(np.nextafter(grid[at], np.inf)), QUICK_NODES)
            if isinstance(found, StageResult):
                best = replace(found, bound=bound)
                break
            at = max(min(at + stride, len(grid) - 1), at + 1)
            stride *= 2
        if not np.isfinite(best.seconds):
            found = self._search(stage, np.inf, LAST_RESORT * self.nodes)
            if isinstance(found, StageResult):
                return replace(found, bound=bound)
            return StageResult(np.inf, np.inf if found == IMPOSSIBLE else bound)
        return best

    def _between(self, stage: int, best: StageResult) -> StageResult:
        """Better placements by a binary search over the seconds at which options appear."""
        grid, bound = self.bounds.grid, best.bound
        low = int(np.searchsorted(grid, bound))
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

    def _polished(
        self, stage: int, known: StageResult, replacements: int, nodes: int
    ) -> StageResult:
        """Placements that take less time, where the stage is too large to search completely."""
        modules = list(bits(stage))
        if known.placements and not known.exact:
            chosen, gpus, content = self._classes(modules, known.placements)
            chosen, gpus, content = repack(
                *self._inputs(modules), chosen, gpus, content, RESTARTS, replacements, *REPLACED,
                JITTER, ROUNDING, nodes, stage % SEEDS,
            )
            found = self._placed(modules, chosen, gpus, content)
            if found.seconds < known.seconds:
                known = replace(found, bound=known.bound)
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
        if self.stop is not None and self.stop():
            raise Interrupted
        modules = list(bits(stage))
        inputs = self._inputs(modules)
        tables, rest = inputs[:4], inputs[4:]
        nobody, nothing = np.zeros((len(modules), 2), np.int64), np.zeros(1, np.int64)
        outcome = IMPOSSIBLE
        for spread in (False, True):
            self.searches += 1
            outcome, _, chosen, gpus, placed = pack(
                *tables, before, *rest, spread, np.ones(len(modules)), nobody,
                np.array([self.problem.gpus]), nothing, nodes,
            )
            if outcome == FOUND:
                return self._placed(modules, chosen, gpus, placed)
            if outcome == IMPOSSIBLE:
                break
        return outcome

    def _inputs(self, modules: list[int]) -> tuple[Any, ...]:
        """The problem's part of the arguments of ``pack`` and ``repack``."""
        problem, model = self.problem, self.problem.interference
        limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
        return (
            problem.seconds[modules], self._memory[modules], problem.bandwidth[modules],
            self.bounds.entry[modules], problem.gpus, problem.steps, limit, self._coefficients,
            model.coupling == "own", model.unit == "relative",
        )

    def _classes(
        self, modules: list[int], placements: Sequence[Placement]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Placements as ``pack`` returns them; :meth:`_placed` is the way back."""
        chosen = np.zeros((len(modules), 2), np.int64)
        content = [0] * self.problem.gpus
        for placement in placements:
            local = modules.index(self.problem.names.index(placement.module))
            chosen[local] = len(placement.gpus), placement.quota
            for g in placement.gpus:
                content[g] |= 1 << local
        classes = Counter(content)
        return chosen, np.array(list(classes.values())), np.array(list(classes))

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
        inputs = self._inputs(modules)
        seconds = class_seconds(
            inputs[0], inputs[2], chosen, gpus, content, *inputs[7:]
        ).max()
        return StageResult(float(seconds), 0.0, placements)
