"""Algorithm 1 of Mosaic: greedy agglomerative clustering of stages (GAHC)."""

from __future__ import annotations

from typing import Protocol

from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.sequences import alone_in_slot, in_order_within
from raymm.scheduler.multiplex.solver.stage_evaluation import StageResult


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
