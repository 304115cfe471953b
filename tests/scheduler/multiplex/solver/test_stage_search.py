"""Searches for the least seconds of a stage, and repacking of what they find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.mapping_instances import random_problem
from raymm.scheduler.multiplex.mapping import module_seconds
from raymm.scheduler.multiplex.solver.packing import IMPOSSIBLE, SOLVED, StagePacking
from raymm.scheduler.multiplex.solver.stage_evaluation import StageBounds
from raymm.scheduler.multiplex.solver.stage_search import (
    Repacking,
    SearchEffort,
    class_seconds,
    least_seconds,
    pack_either,
    repack,
)
from tests.scheduler.multiplex.solver.test_packing import inputs_of
from tests.support.mapping_problems import brute_force_stage, problems

EFFORT = SearchEffort(10**4, 10**5, 10**6, 1e-11)


@given(problems(most=3, edges=False))
def test_the_least_seconds_are_found_and_proven(problem) -> None:
    stage = (1 << len(problem.names)) - 1
    bounds = StageBounds(problem)
    seconds, bound, _, packed = least_seconds(
        inputs_of(problem), bounds.grid, bounds.bound(stage), EFFORT
    )
    least = brute_force_stage(problem, stage)
    if not math.isfinite(least):
        assert bound == seconds == math.inf
        return
    assert seconds == pytest.approx(least, rel=1e-9) and bound == pytest.approx(least, rel=1e-9)
    placements = StagePacking(problem.names, packed).placements
    assert class_seconds(inputs_of(problem), packed).tolist() == pytest.approx(
        module_seconds(problem, placements), rel=1e-9
    )


@given(st.integers(0, 5), st.sampled_from([4, 8]))
def test_repacking_never_makes_a_stage_slower(seed: int, gpus: int) -> None:
    problem = random_problem(seed, "parallel", 9, gpus)
    inputs = inputs_of(problem)
    outcome, before, packed = pack_either(inputs, np.inf, 10**5)
    assert outcome in (SOLVED, IMPOSSIBLE)
    if outcome == SOLVED:
        effort = Repacking(2, 6, 2, 4, 0.5, 1e-11, 200)
        found = [repack(inputs, packed, effort, 7) for _ in range(2)]
        after = [class_seconds(inputs, one).max() for one in found]
        assert after[0] == after[1] <= before  # equal seeds give equal results
        assert found[0].gpus.sum() == gpus and (found[0].chosen > 0).all()
