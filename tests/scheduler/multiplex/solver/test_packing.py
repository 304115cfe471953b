"""The compiled search decides if a stage is faster than a deadline, as brute force does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.multiplex.mapping import stage_seconds
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.packing import (
    GAVE_UP,
    IMPOSSIBLE,
    SOLVED,
    InterferenceLaw,
    Pool,
    StageInputs,
    StagePacking,
    nothing_placed,
    pack,
    placement_options,
)
from raymm.scheduler.multiplex.solver.stage_evaluation import NO_LIMIT, entry_seconds
from tests.support.mapping_problems import brute_force_stage, problems


def inputs_of(problem: MappingProblem) -> StageInputs:
    """Return the inputs of a stage with all modules."""
    limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
    law = InterferenceLaw.of(problem.interference)
    return StageInputs(
        problem.seconds, problem.memory, problem.bandwidth, entry_seconds(problem),
        Pool(problem.gpus, problem.steps, limit, law),
    )


@given(problems(most=3, edges=False), st.floats(0.5, 1.5), st.booleans())
def test_a_stage_is_packed_if_brute_force_finds_placements(problem, factor, spread) -> None:
    count = len(problem.names)
    least = brute_force_stage(problem, (1 << count) - 1)
    before = factor * (least if math.isfinite(least) else 1.0)
    outcome, _, packed = pack(
        inputs_of(problem), before, spread, np.ones(count), nothing_placed(count, problem.gpus),
        10**6,
    )
    if abs(least - before) > 1e-9 * before:
        assert outcome == (SOLVED if least < before else IMPOSSIBLE)
    if outcome == SOLVED:
        packing = StagePacking(problem.names, packed)
        assert stage_seconds(problem, packing.placements) <= before * (1 + 1e-9)
        again = StagePacking.of(problem.names, packing.placements, problem.gpus)
        assert len(again.placements) == count
        assert stage_seconds(problem, again.placements) == pytest.approx(
            stage_seconds(problem, packing.placements)
        )


@given(problems(most=3, edges=False), st.floats(0.2, 20))
def test_options_are_in_time_and_the_best_of_their_area(problem, before) -> None:
    inputs = inputs_of(problem)
    for m, row in enumerate(placement_options(inputs, before)):
        count = int((row["degree"] == 0).argmax())
        areas = row["area"][:count]
        assert (np.diff(areas) >= 0).all()
        for option in row[:count]:
            seconds = problem.seconds[m, int(option["degree"]).bit_length() - 1, option["quota"]]
            assert seconds < before and option["cap"] > 0
        possible = (problem.seconds[m] < before).any()
        assert bool(count) == bool(possible)


def test_a_search_gives_up_at_its_limit() -> None:
    from benchmarks.shared.mapping_instances import random_problem

    problem = random_problem(0, "parallel", 12, 8)
    count = len(problem.names)
    outcome, nodes, packed = pack(
        inputs_of(problem), float(np.nanmin(problem.seconds)) * 4, False, np.ones(count),
        nothing_placed(count, problem.gpus), 3,
    )
    assert outcome in (GAVE_UP, IMPOSSIBLE) and nodes <= 4 and not packed.chosen.any()
