"""Stage sequences: legal orders of sets of modules, and mappings made of them."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.stage_evaluation import StageEvaluator


def in_order(problem: MappingProblem, stages: Sequence[int]) -> list[int] | None:
    """The stages (sets of modules) so that every dependency is met; None if that is impossible."""
    result: list[int] = []
    waiting, done = list(stages), 0
    while waiting:
        for stage in waiting:
            before = 0
            for m in bits(stage):
                before |= problem.ancestors[m]
            if not before & ~done:
                result.append(stage)
                waiting.remove(stage)
                done |= stage
                break
        else:
            return None
    return result


def alone_in_turn(problem: MappingProblem) -> list[int]:
    """Every module a stage of its own, in topological order (Algorithm 1, line 3)."""
    return in_order(problem, [1 << m for m in range(len(problem.names))]) or []


def components(problem: MappingProblem) -> list[int]:
    """Cut the modules where everything before depends on nothing after and all after on all
    before: no stage can have modules of both sides, so each part is mapped by itself."""
    parts: list[int] = []
    everyone, done, part = (1 << len(problem.names)) - 1, 0, 0
    for stage in alone_in_turn(problem):
        part |= stage
        rest = everyone & ~done & ~part
        if all(not part & ~problem.ancestors[m] for m in bits(rest)):
            parts.append(part)
            done |= part
            part = 0
    return parts


def total_seconds(evaluator: StageEvaluator, stages: Sequence[int]) -> float:
    """Sum of the stages' seconds."""
    return sum(evaluator.result(stage).seconds for stage in stages)


def mapping_of(
    evaluator: StageEvaluator, stages: Sequence[int], bound: float, method: str
) -> Mapping:
    """A mapping of the stages, each as the evaluator knows it best."""
    problem = evaluator.problem
    made = tuple(
        MultiplexStage(evaluator.result(stage).placements, evaluator.result(stage).seconds)
        for stage in stages
    )
    return Mapping(problem.gpus, problem.steps, made, max(0.0, bound), method)
