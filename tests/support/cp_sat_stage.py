"""StageEval as in Mosaic §3.4: CP-SAT decides if a stage is possible in a given time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from ortools.sat.python import cp_model

from raymm.scheduler.multiplex.mapping import Placement, stage_seconds
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.packing import StagePacking
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageBounds, StageResult


class CpSatStageEvaluator:
    """Exact seconds of stages by binary search over feasibility tests.

    One variable per module, option (degree and quota) and GPU. Interference is not linear, so the
    content of a GPU is checked in each solution. If a module on it is too slow, exactly this
    content (or, if more modules can only make it worse, also every superset) is forbidden on all
    GPUs, and the problem is solved again.

    Args:
        problem: problem of the stages.
        stop: called between solves; raises ``KeyboardInterrupt`` if it returns True.
    """

    def __init__(
        self, problem: MappingProblem, stop: Callable[[], bool] | None = None
    ) -> None:
        self.problem = problem
        self.stop = stop
        self.bounds = StageBounds(problem)
        self.results: dict[int, StageResult] = {}
        self.solves = 0

    def result(self, stage: int) -> StageResult:
        """Return the least seconds of a stage; infinite if it cannot be placed."""
        if stage not in self.results:
            self.results[stage] = self._evaluate(stage)
        return self.results[stage]

    def forget(self) -> None:
        """Clear all cached results."""
        self.results.clear()

    def known_bound(self, stage: int) -> float:
        """Return a lower bound of the stage's seconds, without solving it."""
        return self.bounds.bound(stage)

    def _evaluate(self, stage: int) -> StageResult:
        grid = self.bounds.grid
        low, high = int(np.searchsorted(grid, self.bounds.bound(stage))), len(grid)
        best = StageResult(math.inf, math.inf)
        while low < high:
            middle = (low + high) // 2
            found = self._feasible(stage, float(np.nextafter(grid[middle], np.inf)))
            if found is None:
                low = middle + 1
            else:
                best, high = found, middle
        # With interference seconds lie between the grid's; without, this ends immediately.
        while (found := self._feasible(stage, best.seconds * (1 - ROUNDING))) is not None:
            best = found
        return StageResult(best.seconds, best.seconds, best.packing)

    def _feasible(self, stage: int, before: float) -> StageResult | None:
        problem = self.problem
        modules = list(bits(stage))
        model = cp_model.CpModel()
        chosen: list[dict[tuple[int, int], cp_model.IntVar]] = []
        placed: list[dict[tuple[int, int], list[cp_model.IntVar]]] = []
        for i, m in enumerate(modules):
            options = [(int(j), int(q)) for j, q in np.argwhere(problem.seconds[m] < before)]
            if not options:
                return None
            chosen.append({o: model.new_bool_var(f"{i}{o}") for o in options})
            placed.append({
                o: [model.new_bool_var(f"{i}{o}{g}") for g in range(problem.gpus)] for o in options
            })
            model.add_exactly_one(chosen[i].values())
            for (j, q), on in placed[i].items():
                model.add(sum(on) == (1 << j) * chosen[i][j, q])
        for g in range(problem.gpus):
            terms = [(i, o, on[g]) for i in range(len(modules)) for o, on in placed[i].items()]
            model.add(sum(o[1] * x for _, o, x in terms) <= problem.steps)
            if problem.memory_bytes is not None:
                model.add(sum(
                    int(problem.memory[modules[i], o[0]]) * x for i, o, x in terms
                ) <= problem.memory_bytes)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        while True:
            self.solves += 1
            if self.stop is not None and self.stop():
                raise KeyboardInterrupt
            if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                return None
            options = [
                next(o for o, x in one.items() if solver.boolean_value(x)) for one in chosen
            ]
            sets = [
                tuple(g for g, x in enumerate(placed[i][o]) if solver.boolean_value(x))
                for i, o in enumerate(options)
            ]
            placements = tuple(
                Placement(problem.names[m], sets[i], options[i][1]) for i, m in enumerate(modules)
            )
            seconds = stage_seconds(problem, placements)
            if seconds < before:
                names = [problem.names[m] for m in modules]
                return StageResult(
                    seconds, 0.0, StagePacking.of(names, placements, problem.gpus)
                )
            for content in {
                tuple(i for i, on in enumerate(sets) if g in on) for g in range(problem.gpus)
            }:
                self._forbid(model, modules, options, placed, content, before)

    def _forbid(self, model, modules, options, placed, content, before) -> None:
        """Forbid a GPU's content if one of its modules is too slow there."""
        use = [float(self.problem.bandwidth[modules[i], options[i][1]]) for i in content]
        alone = [float(self.problem.seconds[(modules[i], *options[i])]) for i in content]
        law = self.problem.interference
        slow = False
        for k in range(len(content)):
            slow |= law.seconds(alone[k], law.delay(use[k], use[:k] + use[k + 1 :])) >= before
        if not slow:
            return
        # Too slow by the additive term alone: more modules do not help.
        worse = law.additive >= 0 and law.product >= 0 and len(content) > 1 and any(
            law.seconds(a, max(0.0, law.constant + law.additive * math.fsum(use))) >= before
            for a in alone
        )
        for g in range(self.problem.gpus):
            here = sum(placed[i][options[i]][g] for i in content)
            others = 0 if worse else sum(
                on[g] for i in range(len(modules)) if i not in content for on in placed[i].values()
            )
            model.add(here - others <= len(content) - 1)
