"""Entry point of the mapping solver."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.graph.strict_json import number, whole
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.exact import (
    Effort,
    alone_in_slot,
    best_partition,
    best_sequence,
    components,
    in_order_within,
    mapping_of,
    total_seconds,
)
from raymm.scheduler.multiplex.solver.memory_search import fitted
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageEvaluator, StageResult

STRATEGIES = ("auto", "greedy", "exact", "local_search")
# Number of random changes in one kick out of a local optimum.
KICKS = (2, 3, 4)

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
        max(1, effort.branches * FEW // max(FEW, len(problem.names) ** 2)),
        lambda: INTERRUPTED in sequence.method or stopped(),
    )


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
                self.evaluator, part, self.best[part], effort,
                partial(self.better, part), partial(self.raise_bound, part),
            )
        except NoPlanError:
            return False
        self.done[part] = "dynamic programming"
        return True

    def _local_search(self, part: int, seed: int, kicks: int, tries: int) -> None:
        """Improve the stages of a part. A step moves a module to another or a separate stage, swaps
        two modules, or merges two stages. The steps that may save most according to bounds are
        tried first. If no step saves time, a few random steps are made and the descent restarts.

        Args:
            tries: no restarts after this many searches within stages.
        """
        evaluator, rng, better = self.evaluator, random.Random(seed), partial(self.better, part)
        last = evaluator.searches + tries
        best = _descend(evaluator, list(self.best[part]), part, better, None)
        best_seconds = total_seconds(evaluator, best)
        for _ in range(kicks):
            if best_seconds <= self.bound[part] * (1 + ROUNDING) or part.bit_count() < 2:
                break
            if evaluator.searches > last:
                break
            started = _kicked(evaluator.problem, best, part, rng)
            lowered = _descend(evaluator, started, part, better, best_seconds)
            seconds = total_seconds(evaluator, lowered)
            if seconds < best_seconds * (1 - ROUNDING):
                best, best_seconds = lowered, seconds
        self.done[part] = "local search"

    def _refine(self, part: int, effort: Effort) -> None:
        """Spend more effort on the stages of the result."""
        for stage in self.best[part]:
            self.evaluator.refined(stage, effort.nodes)

    def _exact_partition(self, part: int, effort: Effort) -> None:
        try:
            best_partition(
                self.evaluator, part, self.best[part], effort,
                partial(self.better, part), partial(self.raise_bound, part),
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


class Evaluator(Protocol):
    """Interface for the evaluation of stages (StageEval)."""

    problem: MappingProblem

    def result(self, stage: int) -> StageResult:
        """Return seconds and placements of a stage; results are cached."""
        ...

    def forget(self) -> None:
        """Clear the cache."""

    def known_bound(self, stage: int) -> float:
        ...


def merge_greedily(
    evaluator: Evaluator, within: int | None = None, prune: bool = True, cache: bool = True
) -> list[int]:
    """Return the stages of Algorithm 1 as sets of modules, in an order that meets every dependency:
    start with one stage per module, and apply the merge that saves most until no merge saves time.

    Args:
        within: modules to map (bits); all by default.
        prune: EarlyPrune: skip a pair without solving it if a lower bound of the merged stage
            excludes a larger gain than the best. The bound covers single modules, as in the paper,
            and all modules together. The result is the same.
        cache: True to cache solved stages. The result is the same.
    """
    problem = evaluator.problem
    stages = alone_in_slot(problem, within)
    seconds = {stage: evaluator.result(stage).seconds for stage in stages}
    while len(stages) > 1:
        best_gain, best = 0.0, None
        for first, second in mergeable(problem, stages):
            merged = first | second
            unmerged_seconds = seconds[first] + seconds[second]
            if prune and evaluator.known_bound(merged) >= unmerged_seconds - best_gain:
                continue
            if not cache:
                evaluator.forget()
            gain = unmerged_seconds - evaluator.result(merged).seconds
            if gain > best_gain:
                best_gain, best = gain, (first, second)
        if best is None:
            break
        merged = best[0] | best[1]
        seconds[merged] = evaluator.result(merged).seconds
        unmerged = [stage for stage in stages if stage not in best]
        stages = in_order_within(problem, [*unmerged, merged], within)
    return stages


def mergeable(problem: MappingProblem, stages: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of stages that can be merged: no dependency leads from one to the other,
    directly or through other stages."""
    reach = []
    for stage in stages:
        ancestors = 0
        for m in bits(stage):
            ancestors |= problem.ancestors[m]
        reach.append(sum(1 << t for t, predecessor in enumerate(stages) if predecessor & ancestors))
    # Stages are in order, so in one pass all predecessors are complete.
    for s in range(len(stages)):
        for t in bits(reach[s]):
            reach[s] |= reach[t]
    return [
        (stages[s], stages[t])
        for s in range(len(stages)) for t in range(s + 1, len(stages))
        if not reach[t] >> s & 1
    ]


def _descend(
    evaluator: StageEvaluator, stages: list[int], within: int,
    better: Callable[[list[int]], None], below: float | None,
) -> list[int]:
    """Take improving steps until there are none; call ``better`` with stages faster than
    ``below``."""
    if below is None:
        better(stages)
    while True:
        better_stages = _best_step(evaluator, stages, within)
        if better_stages is None:
            return stages
        stages = better_stages
        seconds = total_seconds(evaluator, stages)
        if below is None or seconds < below:
            better(stages)
            below = seconds


def _best_step(evaluator: StageEvaluator, stages: list[int], within: int) -> list[int] | None:
    seconds = {stage: evaluator.result(stage).seconds for stage in stages}
    candidates = []
    for replaced, new in steps(evaluator.problem, stages):
        now = sum(seconds[stage] for stage in replaced)
        least = sum(evaluator.known_bound(stage) for stage in new)
        if least < now * (1 - ROUNDING):
            candidates.append((least - now, replaced, new))
    candidates.sort()
    for _, replaced, new in candidates:
        now = sum(seconds[stage] for stage in replaced)
        unchanged = [stage for stage in stages if stage not in replaced]
        ordered = in_order_within(evaluator.problem, [*unchanged, *new], within)
        if ordered and _below(evaluator, new, now * (1 - ROUNDING)):
            return ordered
    return None


def _below(evaluator: StageEvaluator, stages: Sequence[int], seconds: float) -> bool:
    """Return True if the stages take less than ``seconds`` in total. As most do not, cheap probes
    of the stages come first."""
    for solve in (False, True):
        least = [evaluator.known_bound(stage) for stage in stages]
        for i, stage in enumerate(stages):
            below = seconds - sum(least[:i]) - sum(least[i + 1 :])
            result = evaluator.result(stage) if solve else evaluator.probe(stage, below)
            if not result.seconds < below:
                return False
            least[i] = result.seconds if solve else result.bound
    return True


def steps(
    problem: MappingProblem, stages: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (old stages, new stages) of every step whose new stages have no dependent modules.
    The order of stages is not checked."""
    conflicts = {stage: 0 for stage in stages}
    for stage in stages:
        for m in bits(stage):
            conflicts[stage] |= problem.related[m]
    for stage in stages:
        for m in bits(stage):
            module = 1 << m
            remaining = stage ^ module
            if remaining:
                yield (stage,), (remaining, module)
            for second in stages:
                if second == stage:
                    continue
                if not conflicts[second] & module:
                    yield (stage, second), (
                        (remaining, second | module) if remaining else (second | module,)
                    )
                if second < stage:
                    continue
                for n in bits(second):
                    if problem.related[m] & second & ~(1 << n):
                        break
                    if not problem.related[n] & remaining:
                        yield (stage, second), (remaining | 1 << n, second ^ 1 << n | module)
    for i, stage in enumerate(stages):
        for second in stages[i + 1 :]:
            if not conflicts[stage] & second and stage.bit_count() > 1 < second.bit_count():
                yield (stage, second), (stage | second,)


def _kicked(
    problem: MappingProblem, stages: list[int], within: int, rng: random.Random
) -> list[int]:
    for _ in range(rng.choice(KICKS)):
        possible = list(steps(problem, stages))
        for replaced, new in rng.sample(possible, min(10, len(possible))):
            unchanged = [stage for stage in stages if stage not in replaced]
            ordered = in_order_within(problem, [*unchanged, *new], within)
            if ordered:
                stages = ordered
                break
    return stages
