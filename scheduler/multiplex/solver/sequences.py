"""Stage sequences: legal orders of sets of modules, and mappings made of them."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.stage_evaluation import StageEvaluator


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


def in_order_within(problem: MappingProblem, stages: list[int], within: int | None) -> list[int]:
    """The stages of a part of the modules in order; what is outside counts as done.

    Args:
        problem: what is to be mapped.
        stages: sets of modules, as bits.
        within: the modules that count; None for all.
    """
    if within is None:
        return in_order(problem, stages) or []
    outside = [1 << m for m in range(len(problem.names)) if not within >> m & 1]
    before = [s for s in outside if not _depends(problem, s, within)]
    ordered = in_order(problem, [*before, *stages, *(s for s in outside if s not in before)]) or []
    return [stage for stage in ordered if stage in stages]


def alone_in_slot(problem: MappingProblem, within: int | None = None) -> list[int]:
    """Every module (of those within) a stage of its own, in topological order (Algorithm 1,
    line 3)."""
    stages = in_order(problem, [1 << m for m in range(len(problem.names))]) or []
    return [stage for stage in stages if within is None or stage & within]


def components(problem: MappingProblem) -> list[int]:
    """Cut the modules where everything before depends on nothing after and all after on all
    before: no stage can have modules of both sides, so each part is mapped by itself."""
    parts: list[int] = []
    everyone, done, part = (1 << len(problem.names)) - 1, 0, 0
    for stage in alone_in_slot(problem):
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
    """A mapping of the stages, each as the evaluator knows it best.

    Args:
        evaluator: knows what stages take.
        stages: sets of modules as bits, in order.
        bound: no mapping takes fewer seconds.
        method: that found it.
    """
    problem = evaluator.problem
    mapped = tuple(
        MultiplexStage(evaluator.result(stage).placements, evaluator.result(stage).seconds)
        for stage in stages
    )
    return Mapping(problem.gpus, problem.steps, mapped, max(0.0, bound), method)


def _depends(problem: MappingProblem, stage: int, on: int) -> bool:
    return any(problem.ancestors[m] & on for m in bits(stage))
