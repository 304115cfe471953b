"""Sequences of stages: legal orders of sets of modules, and mappings made of them."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.stage_evaluation import StageEvaluator


def in_order(problem: MappingProblem, stages: Sequence[int]) -> list[int] | None:
    """Return the stages (sets of modules) in an order that meets every dependency; None if there is
    none."""
    result: list[int] = []
    waiting, done = list(stages), 0
    while waiting:
        for stage in waiting:
            ancestors = 0
            for m in bits(stage):
                ancestors |= problem.ancestors[m]
            if not ancestors & ~done:
                result.append(stage)
                waiting.remove(stage)
                done |= stage
                break
        else:
            return None
    return result


def in_order_within(problem: MappingProblem, stages: list[int], within: int | None) -> list[int]:
    """Return stages in order; modules outside ``within`` count as done."""
    if within is None:
        return in_order(problem, stages) or []
    outside = [1 << m for m in range(len(problem.names)) if not within >> m & 1]
    sources = [s for s in outside if not _depends(problem, s, within)]
    ordered = in_order(
        problem, [*sources, *stages, *(s for s in outside if s not in sources)]
    ) or []
    return [stage for stage in ordered if stage in stages]


def alone_in_slot(problem: MappingProblem, within: int | None = None) -> list[int]:
    """Return one stage per module (of ``within``), in topological order (Algorithm 1, line 3)."""
    stages = in_order(problem, [1 << m for m in range(len(problem.names))]) or []
    return [stage for stage in stages if within is None or stage & within]


def components(problem: MappingProblem) -> list[int]:
    """Split the modules into parts where each part depends on all earlier parts, and none depends
    on later ones. No stage has modules of two parts, so each part is mapped separately."""
    ordered: list[int] = []
    all_modules, done, component = (1 << len(problem.names)) - 1, 0, 0
    for stage in alone_in_slot(problem):
        component |= stage
        remaining = all_modules & ~done & ~component
        if all(not component & ~problem.ancestors[m] for m in bits(remaining)):
            ordered.append(component)
            done |= component
            component = 0
    return ordered


def total_seconds(evaluator: StageEvaluator, stages: Sequence[int]) -> float:
    return sum(evaluator.result(stage).seconds for stage in stages)


def mapping_of(
    evaluator: StageEvaluator, stages: Sequence[int], bound: float, method: str
) -> Mapping:
    """Return a mapping of the stages (sets of modules as bits) with the best known placements."""
    problem = evaluator.problem
    mapped = tuple(
        MultiplexStage(evaluator.result(stage).placements, evaluator.result(stage).seconds)
        for stage in stages
    )
    return Mapping(problem.gpus, problem.steps, mapped, max(0.0, bound), method)


def _depends(problem: MappingProblem, stage: int, on: int) -> bool:
    return any(problem.ancestors[m] & on for m in bits(stage))
