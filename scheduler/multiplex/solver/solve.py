"""Entry point of the mapping solver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.graph.strict_json import number, whole
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.greedy import merge_greedily
from raymm.scheduler.multiplex.solver.local_search import improve
from raymm.scheduler.multiplex.solver.memory_search import fitted
from raymm.scheduler.multiplex.solver.partition_columns import best_partition
from raymm.scheduler.multiplex.solver.sequence_dp import best_sequence
from raymm.scheduler.multiplex.solver.sequences import (
    alone_in_slot,
    components,
    mapping_of,
    total_seconds,
)
from raymm.scheduler.multiplex.solver.stage_evaluation import StageEvaluator

STRATEGIES = ("auto", "greedy", "exact", "local_search")


@dataclass(frozen=True)
class Effort:
    """Limits of a search, in counts of work instead of seconds, so that results are reproducible.

    Attributes:
        transitions: most transitions between states of the dynamic program.
        stages: most stages of the partition program.
        nodes: most placements that one search within a stage tries.
        searches: most searches within stages for the dynamic program.
        tries: number of searches within stages after which the local search does not restart.
        branches: most restricted problems to solve if memory over the iteration is short.
    """

    transitions: int
    stages: int
    nodes: int
    searches: int
    rounds: int
    kicks: int
    tries: int
    branches: int = 24


AUTO = Effort(500_000, 2**20, nodes=130_000, searches=2_300, rounds=1, kicks=80, tries=8_000)
LOCAL = Effort(0, 0, nodes=130_000, searches=0, rounds=0, kicks=80, tries=60_000)
INTERRUPTED = ", interrupted"
# Branches are reduced if the squared number of modules exceeds this.
FEW = 64
# Most stages of the partition program for restricted problems.
FEW_STAGES = 2**12
# Restarts of the local search before the dynamic program.
FIRST_KICKS = 2
EXACT = Effort(
    20_000_000, 2**22, nodes=40_000_000, searches=2**62, rounds=100_000, kicks=80, tries=100_000,
    branches=2_000,
)


def solve(
    problem: MappingProblem, strategy: str = "auto", *, seed: int = 0,
    deadline_seconds: float | None = None, stop: Callable[[], bool] | None = None,
    effort: Effort | None = None,
) -> Mapping:
    """Return a mapping with its predicted seconds, a proven bound, and its ``method``.

    Modules are split into parts that no stage can span, and each part is solved:

    - ``"greedy"``: Algorithm 1 of Mosaic §3.4, with this package's evaluation of stages, which
      finds the same results as CP-SAT as printed in the paper.
    - ``"local_search"``: starts there and moves, swaps, merges and splits.
    - ``"exact"``: dynamic programming over stage sequences or, with many independent modules, a set
      partitioning program, until optimality is proven. Give a deadline, as it may take very long.
    - ``"auto"``: exact if there are few states, otherwise local search and one round of the
      partition program, whose bound remains as the gap.

    If the result does not fit in memory over the iteration, the GPUs of stages are renumbered, and
    if necessary the problem is solved again with fewer degrees
    (:func:`raymm.scheduler.multiplex.solver.memory_search.fitted`). If no mapping fits, this is
    noted in ``method``, and the mapping is the fastest whose stages fit separately. Without a
    deadline or ``stop`` the result depends on the arguments only.

    Args:
        deadline_seconds: return the best mapping so far after this many seconds.
        stop: polled often; return the best mapping so far when it returns True, as for Ctrl-C.
        effort: limits of the search; by default those of the strategy.

    Raises:
        PlanError: an unknown strategy or a negative seed or deadline.
    """
    if not isinstance(problem, MappingProblem):
        raise PlanError(f"problem is {problem!r:.80}; it must be a MappingProblem")
    if strategy not in STRATEGIES:
        raise PlanError(
            f"strategy is {strategy!r:.80}; accepted: {', '.join(STRATEGIES)}"
        )
    whole(seed, "seed")
    if deadline_seconds is not None and deadline_seconds != math.inf:
        number(deadline_seconds, "deadline_seconds", 0.0)
    until = None if deadline_seconds is None else time.monotonic() + deadline_seconds

    def stopped() -> bool:
        late = until is not None and time.monotonic() >= until
        return late or (stop is not None and stop())

    if effort is None:
        effort = {"exact": EXACT, "local_search": LOCAL}.get(strategy, AUTO)
    sequence = _solve(problem, strategy, seed, effort, stopped)
    if problem.memory_bytes is None or problem.memory_over == "stage":
        return sequence
    # Many more problems may follow, each with at least the bound of the first.
    again = replace(
        effort, tries=effort.tries // 16, kicks=min(effort.kicks, 4),
        stages=min(effort.stages, FEW_STAGES),
    )
    return fitted(
        problem, sequence,
        lambda restricted: _solve(
            restricted, strategy, seed, effort if strategy == "exact" else again, stopped
        ),
        _branches(problem, effort), lambda: INTERRUPTED in sequence.method or stopped(),
    )


def _branches(problem: MappingProblem, effort: Effort) -> int:
    return max(1, effort.branches * FEW // max(FEW, len(problem.names) ** 2))


def _solve(
    problem: MappingProblem, strategy: str, seed: int, effort: Effort, stop: Callable[[], bool]
) -> Mapping:
    search = _Search(problem, stop)
    interrupted = ""
    try:
        for component in search.best:
            search.solve_part(component, strategy, seed, effort)
    except KeyboardInterrupt:
        interrupted = INTERRUPTED
    return search.mapping(strategy, interrupted)


class _Search:
    """Best stages of every part so far. They always exist, so an interruption loses nothing."""

    def __init__(self, problem: MappingProblem, stop: Callable[[], bool]) -> None:
        self.evaluator = StageEvaluator(problem)
        self.best = {
            component: alone_in_slot(problem, component) for component in components(problem)
        }
        for stages in self.best.values():
            total_seconds(self.evaluator, stages)
        self.evaluator.interrupt_if(stop)
        self.bound = {
            component: max(self.evaluator.known_bound(stage) for stage in stages)
            for component, stages in self.best.items()
        }
        self.done: dict[int, str] = {}

    def solve_part(self, part: int, strategy: str, seed: int, effort: Effort) -> None:
        if part.bit_count() == 1:
            self.done[part] = "single"
            self.raise_bound(part, self.evaluator.result(part).bound)
            return
        self.better(part, merge_greedily(self.evaluator, part))
        self.done[part] = "greedy"
        if strategy in ("auto", "exact"):
            # Good initial stages leave the exact search fewer stages to solve.
            self._local_search(part, seed, min(FIRST_KICKS, effort.kicks), effort.tries)
            if self._exact_sequence(part, effort):
                self._refine(part, effort)
                return
        if not strategy.startswith("greedy"):
            self._local_search(part, seed, effort.kicks, effort.tries)
            self._refine(part, effort)
        if strategy in ("auto", "exact"):
            self._exact_partition(part, effort)

    def _exact_sequence(self, part: int, effort: Effort) -> bool:
        try:
            best_sequence(
                self.evaluator, part, self.best[part], effort.transitions, effort.nodes,
                effort.searches, lambda stages: self.better(part, stages),
                lambda bound: self.raise_bound(part, bound),
            )
        except NoPlanError:
            return False
        self.done[part] = "dynamic programming"
        return True

    def _local_search(self, part: int, seed: int, kicks: int, tries: int) -> None:
        improve(
            self.evaluator, self.best[part], part, kicks, seed,
            lambda stages: self.better(part, stages), self.bound[part], tries,
        )
        self.done[part] = "local search"

    def _refine(self, part: int, effort: Effort) -> None:
        """Spend more effort on the stages of the result."""
        for stage in self.best[part]:
            self.evaluator.refined(stage, effort.nodes)

    def _exact_partition(self, part: int, effort: Effort) -> None:
        try:
            best_partition(
                self.evaluator, part, self.best[part], effort.stages, effort.nodes, effort.rounds,
                lambda stages: self.better(part, stages),
                lambda bound: self.raise_bound(part, bound),
            )
        except NoPlanError:
            return
        self.done[part] += " and partition program"

    def better(self, part: int, stages: list[int]) -> None:
        if total_seconds(self.evaluator, stages) < total_seconds(self.evaluator, self.best[part]):
            self.best[part] = list(stages)

    def raise_bound(self, part: int, bound: float) -> None:
        self.bound[part] = max(self.bound[part], bound)

    def mapping(self, strategy: str, interrupted: str) -> Mapping:
        seconds = {p: total_seconds(self.evaluator, stages) for p, stages in self.best.items()}
        bound = sum(min(self.bound[p], seconds[p]) for p in self.best)
        stages = [stage for sequence in self.best.values() for stage in sequence]
        ways = sorted({self.done.get(p, "in turn") for p in self.best if p.bit_count() > 1})
        method = f"{strategy} ({', '.join(ways) or 'single modules'}{interrupted})"
        return mapping_of(self.evaluator, stages, bound, method)
