"""Mappings that fit in memory over a whole iteration, compared with brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given

from benchmarks.shared.mapping_instances import random_problem
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.iteration_memory import (
    balanced,
    fits_iteration,
)
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.memory_search import UNFIT
from raymm.scheduler.multiplex.solver.solve import solve
from tests.support.mapping_problems import brute_force_iteration, problems


def short_of_memory(most: int, pools: tuple[int, ...]):
    return problems(
        most=most, pools=pools, steps=(2,), memory_over="iteration", limits=(5, 6, 7, 8, 10),
    )


@given(short_of_memory(3, (1, 2, 3)))
def test_iteration_memory_equals_brute_force(problem) -> None:
    """Check that fitting mappings are found or bounded, and that proven ones are optimal."""
    least = brute_force_iteration(problem)
    found = solve(problem, "exact")
    found.check(problem)
    if not math.isfinite(least):
        assert UNFIT in found.method and not fits_iteration(problem, found)
        return
    if UNFIT in found.method:  # never wrongly proven
        assert found.bound <= least * (1 + 1e-9)
        return
    assert fits_iteration(problem, found)
    assert found.bound <= least * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    if found.optimal:
        assert math.isclose(found.seconds, least, rel_tol=1e-9)


def test_most_small_problems_are_solved_to_proof() -> None:
    """Check that nearly all tight random problems are proven."""
    rng = np.random.default_rng(0)
    proven = fits = tight = 0
    for _ in range(40):
        surfaces = tuple(
            ScalingSurface(
                f"m{i}", (1, 2), (1, 2), 2,
                tuple(tuple(float(rng.uniform(1, 2) / (d * q)) for q in (1, 2)) for d in (1, 2)),
                (int(rng.integers(3, 6)), int(rng.integers(2, 4))), (0.3, 0.6),
            ) for i in range(3)
        )
        problem = MappingProblem(surfaces, (("m0", "m1"),), 2, 2, 8)
        least = brute_force_iteration(problem)
        if not math.isfinite(least):
            continue
        fits += 1
        found = solve(problem, "exact")
        tight += not math.isclose(
            solve(replace(problem, memory_over="stage"), "exact").seconds, found.seconds
        )
        proven += found.optimal
        if found.optimal:
            assert math.isclose(found.seconds, least, rel_tol=1e-9)
    assert fits > 10 and tight > 3 and proven >= 0.8 * fits


def test_a_tight_large_problem_fits() -> None:
    problem = random_problem(2, "star", 12, 8, memory_over="iteration")
    loose = solve(replace(problem, memory_over="stage"))
    assert not fits_iteration(problem, balanced(problem, loose))
    found = solve(problem)
    found.check(problem)
    assert fits_iteration(problem, found)
    assert loose.bound * (1 - 1e-9) <= found.bound <= found.seconds < 1.2 * loose.seconds
    assert solve(problem) == found
