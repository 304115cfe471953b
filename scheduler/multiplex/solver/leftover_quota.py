"""What a stage leaves of its GPUs, given to its modules.

A search finds the least quota with which a stage is as fast as it can be predicted to be. A
prediction may be wrong, and a quota really holds a module back: one that is alone on its GPUs
should have them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raymm.scheduler.multiplex.mapping import (
    Mapping,
    MultiplexStage,
    Placement,
    module_seconds,
    stage_seconds,
)
from raymm.scheduler.multiplex.problem import MappingProblem


def with_leftover_quota(problem: MappingProblem, mapping: Mapping) -> Mapping:
    """The mapping with what is spare of its GPUs given to the modules there, the slowest first.

    Only where the surface does not say that the module is slower with more, and where the stage
    does not take longer (more bandwidth in use may delay others): no stage's predicted seconds
    rise. GPUs and stages stay as they are.
    """
    stages = []
    for stage in mapping.stages:
        placements = _filled(problem, stage.placements, mapping.slices)
        if placements != stage.placements:
            seconds = stage_seconds(problem, placements, mapping.slices)
            stage = MultiplexStage(placements, seconds)
        stages.append(stage)
    if tuple(stages) == mapping.stages:
        return mapping
    # Where nothing was proven to be best, more quota may have made it faster than was searched.
    seconds = sum(stage.seconds for stage in stages)
    return replace(mapping, stages=tuple(stages), bound=min(mapping.bound, seconds))


def _filled(
    problem: MappingProblem, placements: Sequence[Placement], slices: int
) -> tuple[Placement, ...]:
    raised = list(placements)
    before = module_seconds(problem, raised, slices)
    most = max(before)
    for i in sorted(range(len(raised)), key=lambda i: -before[i]):
        placement = raised[i]
        alone = problem.seconds[
            problem.names.index(placement.module), len(placement.gpus).bit_length() - 1
        ]
        more = problem.steps - max(
            sum(other.quota for other in raised if g in other.gpus) for g in placement.gpus
        )
        while more > 0:  # all of it, else half of that, and so on
            grown = replace(placement, quota=placement.quota + more)
            tried = [*raised[:i], grown, *raised[i + 1 :]]
            if (
                alone[placement.quota + more] <= alone[placement.quota]
                and stage_seconds(problem, tried, slices) <= most
            ):
                raised = tried
                break
            more //= 2
    return tuple(raised)
