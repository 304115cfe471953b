"""Algorithm 1 of Mosaic: greedy agglomerative clustering of stages (GAHC)."""

from __future__ import annotations

from typing import Protocol

from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.sequences import alone_in_slot, in_order_within
from raymm.scheduler.multiplex.solver.stage_evaluation import StageResult


class Evaluator(Protocol):
    """What finds the seconds of a stage (StageEval)."""

    problem: MappingProblem

    def result(self, stage: int) -> StageResult:
        """Seconds and placements of a stage; remembered."""
        ...

    def forget(self) -> None:
        """Remember nothing."""

    def known_bound(self, stage: int) -> float:
        """A lower bound of the stage's seconds, without solving it."""
        ...


def merge_greedily(
    evaluator: Evaluator, within: int | None = None, prune: bool = True, cache: bool = True
) -> list[int]:
    """Stages by Algorithm 1: begin with one per module, apply the merge that saves most, until
    none saves anything.

    Args:
        evaluator: StageEval.
        within: the modules to map (bits); all if not given.
        prune: EarlyPrune: skip a pair without solving it if some module, or all together (which
            the paper does not test), cannot be fast enough for a larger gain than the best. The
            result is the same.
        cache: remember solved stages. The result is the same.

    Returns:
        Sets of modules, in an order that meets every dependency.
    """
    problem = evaluator.problem
    stages = alone_in_slot(problem, within)
    seconds = {stage: evaluator.result(stage).seconds for stage in stages}
    while len(stages) > 1:
        best_gain, best = 0.0, None
        for first, second in mergeable(problem, stages):
            merged = first | second
            apart = seconds[first] + seconds[second]
            if prune and evaluator.known_bound(merged) >= apart - best_gain:
                continue
            if not cache:
                evaluator.forget()
            gain = apart - evaluator.result(merged).seconds
            if gain > best_gain:
                best_gain, best = gain, (first, second)
        if best is None:
            break
        merged = best[0] | best[1]
        seconds[merged] = evaluator.result(merged).seconds
        left = [stage for stage in stages if stage not in best]
        stages = in_order_within(problem, [*left, merged], within)
    return stages


def mergeable(problem: MappingProblem, stages: list[int]) -> list[tuple[int, int]]:
    """Pairs of stages that can become one: no dependency leads from one to the other, neither
    directly nor through other stages."""
    reach = []
    for stage in stages:
        before = 0
        for m in bits(stage):
            before |= problem.ancestors[m]
        reach.append(sum(1 << t for t, other in enumerate(stages) if other & before))
    # Stages are in order, so one pass sees every predecessor complete.
    for s in range(len(stages)):
        for t in bits(reach[s]):
            reach[s] |= reach[t]
    return [
        (stages[s], stages[t])
        for s in range(len(stages)) for t in range(s + 1, len(stages))
        if not reach[t] >> s & 1
    ]
