"""Memory over a training iteration, and renumbering of GPUs to balance it.

An iteration passes through all stages and back, so a GPU keeps the weights, optimizer state and
activations of all modules that it runs in any stage. The seconds of a stage do not depend on which
GPUs of the pool it uses, so GPUs are chosen here to minimise the memory of the fullest one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem

# Passes over all stages that reassign their GPUs, and restarts with the stages in another order.
PASSES = 8
BEGINNINGS = 24


def iteration_memory(problem: MappingProblem, mapping: Mapping) -> tuple[int, ...]:
    """Return the bytes on each GPU over a training iteration. Slices of a module share its weights;
    only the largest counts."""
    most: dict[tuple[int, str], int] = {}
    for stage in mapping.stages:
        for placement in stage.placements:
            for g in placement.gpus:
                size = _replica(problem, placement.module, len(placement.gpus))
                most[g, placement.module] = max(most.get((g, placement.module), 0), size)
    used = [0] * mapping.gpus
    for (g, _), size in most.items():
        used[g] += size
    return tuple(used)


def fits_iteration(problem: MappingProblem, mapping: Mapping) -> bool:
    return (
        problem.memory_bytes is None
        or max(iteration_memory(problem, mapping)) <= problem.memory_bytes
    )


def balanced(problem: MappingProblem, mapping: Mapping) -> Mapping:
    """Renumber the GPUs of each stage so that the fullest GPU keeps less, for mappings without
    slices. Stages are reassigned in turn, starting with the one with the fullest GPU: its largest
    loads go to the GPUs that keep least without it, until nothing changes. Then pairs of GPUs are
    exchanged. If the mapping still does not fit, this restarts with the stages in another order."""
    if mapping.slices > 1 or problem.memory_bytes is None:
        return mapping
    loads = [stage_memory(problem, stage, mapping.gpus) for stage in mapping.stages]
    rng, best, renumbered = random.Random(0), max(iteration_memory(problem, mapping)), None
    order = sorted(range(len(loads)), key=lambda s: (-max(loads[s]), s))
    for _ in range(BEGINNINGS):
        placed, used = _placed(loads, order)
        if max(used) < best:
            best, renumbered = max(used), placed
        if best <= problem.memory_bytes:
            break
        rng.shuffle(order)
    if renumbered is None:
        return mapping
    stages = tuple(
        replace(stage, placements=tuple(
            replace(placement, gpus=tuple(sorted(renumbered[s][g] for g in placement.gpus)))
            for placement in stage.placements
        ))
        for s, stage in enumerate(mapping.stages)
    )
    return replace(mapping, stages=stages)


def _placed(
    loads: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Return the pool's GPU of each local GPU, per stage, and the resulting loads."""
    gpus = len(loads[0])
    pool_gpus = [list(range(gpus)) for _ in loads]
    used = [0] * gpus
    for slot in range(PASSES):
        previous = [list(placement) for placement in pool_gpus]
        for s in order:
            if slot:
                for local, g in enumerate(pool_gpus[s]):
                    used[g] -= loads[s][local]
            largest = sorted(range(gpus), key=lambda g: (-loads[s][g], g))
            emptiest = sorted(range(gpus), key=lambda g: (used[g], g))
            for local, g in zip(largest, emptiest, strict=True):
                pool_gpus[s][local] = g
                used[g] += loads[s][local]
        if pool_gpus == previous:
            break
    _swap(loads, pool_gpus, used)
    return pool_gpus, used


def _swap(loads: Sequence[Sequence[int]], place: list[list[int]], used: list[int]) -> None:
    """Exchange two GPUs of a stage as long as that lowers the load of the fullest GPU."""
    gpus = range(len(used))
    while True:
        full = max(gpus, key=lambda g: used[g])
        best = None
        for s, stage_loads in enumerate(loads):
            full_slot = place[s].index(full)
            for slot, gpu in enumerate(place[s]):
                moved = stage_loads[full_slot] - stage_loads[slot]
                peak = max(used[full] - moved, used[gpu] + moved)
                if moved > 0 and peak < used[full] and (best is None or peak < best[0]):
                    best = peak, s, full_slot, slot, moved
        if best is None:
            return
        _, s, full_slot, slot, moved = best
        used[place[s][full_slot]] -= moved
        used[place[s][slot]] += moved
        place[s][full_slot], place[s][slot] = place[s][slot], place[s][full_slot]


def stage_memory(problem: MappingProblem, stage: MultiplexStage, gpus: int) -> list[int]:
    """Return the bytes on each of ``gpus`` GPUs of the pool in one stage."""
    result = [0] * gpus
    for placement in stage.placements:
        for g in placement.gpus:
            result[g] += _replica(problem, placement.module, len(placement.gpus))
    return result


def _replica(problem: MappingProblem, module: str, degree: int) -> int:
    return int(problem.memory[problem.names.index(module), degree.bit_length() - 1])
