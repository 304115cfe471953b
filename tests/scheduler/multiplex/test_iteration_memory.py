"""Memory over a whole iteration: compared with brute force, and balanced."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.iteration_memory import (
    balanced,
    iteration_memory,
)
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.scheduler.multiplex.problem import MappingProblem


@given(st.integers(0, 2**32))
def test_balancing_changes_gpus_only(seed: int) -> None:
    """Check that memory does not grow, seconds stay, and no swap of two stages is better."""
    rng = np.random.default_rng(seed)
    surfaces = tuple(
        ScalingSurface(
            f"m{i}", (1, 2), (1, 2), 2, ((2.0, 1.0), (1.0, 0.5)),
            (int(rng.integers(1, 20)), int(rng.integers(1, 20))), (0.3, 0.6),
        ) for i in range(4)
    )
    problem = MappingProblem(surfaces, (), 3, 2, 1_000)
    stages = []
    for names in (("m0", "m1"), ("m2", "m3")):
        gpus = [sorted(rng.choice(3, int(rng.integers(1, 3)), replace=False)) for _ in names]
        stages.append(MultiplexStage(tuple(
            Placement(name, tuple(int(g) for g in on), 1)
            for name, on in zip(names, gpus, strict=True)
        ), 1.0))
    mapping = Mapping(3, 2, tuple(stages))
    made = balanced(problem, mapping)
    assert made.seconds == mapping.seconds
    for old, new in zip(mapping.stages, made.stages, strict=True):
        assert [(p.module, p.quota, len(p.gpus)) for p in old.placements] == [
            (p.module, p.quota, len(p.gpus)) for p in new.placements
        ]
        shared = [len(set(old.placements[0].gpus) & set(old.placements[1].gpus)),
                  len(set(new.placements[0].gpus) & set(new.placements[1].gpus))]
        assert shared[0] == shared[1]

    def fullest(order: tuple[int, ...]) -> int:
        moved = replace(mapping.stages[1], placements=tuple(
            replace(p, gpus=tuple(sorted(order[g] for g in p.gpus)))
            for p in mapping.stages[1].placements
        ))
        both = replace(mapping, stages=(mapping.stages[0], moved))
        return max(iteration_memory(problem, both))

    assert max(iteration_memory(problem, made)) == min(
        fullest(order) for order in itertools.permutations(range(3))
    )
