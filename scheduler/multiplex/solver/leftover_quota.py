"""Assignment of unused quota of a stage to its modules.

A search finds the least quota with which a stage reaches its predicted speed. Predictions may be
wrong, and a quota really limits a module, so for example a module that is alone on its GPUs should
have them completely.
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
    """Return the mapping with the unused quota of its GPUs assigned to the modules there, slowest
    first. A module gets more quota only if its surface shows no slowdown and the predicted seconds
    of the stage do not rise (more bandwidth in use may delay other modules)."""
    stages = []
    for stage in mapping.stages:
        placements = _filled(problem, stage.placements, mapping.slices)
        if placements != stage.placements:
            seconds = stage_seconds(problem, placements, mapping.slices)
            stage = MultiplexStage(placements, seconds)
        stages.append(stage)
    if tuple(stages) == mapping.stages:
        return mapping
    # If the search was not exact, additional quota may lower the seconds below its bound.
    seconds = sum(stage.seconds for stage in stages)
    return replace(mapping, stages=tuple(stages), bound=min(mapping.bound, seconds))


def _filled(
    problem: MappingProblem, placements: Sequence[Placement], slices: int
) -> tuple[Placement, ...]:
    raised = list(placements)
    seconds = module_seconds(problem, raised, slices)
    most = max(seconds)
    for i in sorted(range(len(raised)), key=lambda i: -seconds[i]):
        placement = raised[i]
        alone = problem.seconds[
            problem.names.index(placement.module), len(placement.gpus).bit_length() - 1
        ]
        added = problem.steps - max(
            sum(peer.quota for peer in raised if g in peer.gpus) for g in placement.gpus
        )
        while added > 0:  # try all of it, then half of it, and so on
            grown = replace(placement, quota=placement.quota + added)
            tried = [*raised[:i], grown, *raised[i + 1 :]]
            if (
                alone[placement.quota + added] <= alone[placement.quota]
                and stage_seconds(problem, tried, slices) <= most
            ):
                raised = tried
                break
            added //= 2
    return tuple(raised)
