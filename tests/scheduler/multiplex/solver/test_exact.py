"""Exact searches for stages, compared with brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from benchmarks.shared.mapping_instances import random_problem
from raymm.scheduler.multiplex.problem import bits
from raymm.scheduler.multiplex.solver.exact import (
    alone_in_slot,
    best_partition,
    components,
    independent_sets,
)
from raymm.scheduler.multiplex.solver.solve import (
    EXACT,
)
from raymm.scheduler.multiplex.solver.stage_evaluation import StageEvaluator
from tests.support.mapping_problems import (
    brute_force_mapping,
    problems,
)


@given(problems(most=4, pools=(1, 2, 3), steps=(2,), edges=False))
def test_partition_program_is_the_best_of_all(problem) -> None:
    evaluator = StageEvaluator(problem)
    bounds: list[float] = []
    stages, bound = best_partition(
        evaluator, (1 << len(problem.names)) - 1, alone_in_slot(problem),
        replace(EXACT, stages=1000, nodes=10**6, rounds=1000), lambda stages: None, bounds.append,
    )
    least = brute_force_mapping(problem)
    assert sum(evaluator.result(s).seconds for s in stages) == pytest.approx(least, rel=1e-9)
    assert bound == pytest.approx(least, rel=1e-8)
    assert all(b <= least * (1 + 1e-8) for b in bounds)


def test_parts_are_cut_at_full_dependencies() -> None:
    star = random_problem(0, "star", 8, 8)
    assert components(star) == [0b111111, 0b1000000, 0b10000000]
    assert components(random_problem(0, "parallel", 5, 8)) == [0b11111]


@given(problems(most=4))
def test_independent_sets_are_all(problem) -> None:
    everyone = (1 << len(problem.names)) - 1
    wanted = {
        s for s in range(1, everyone + 1) if not any(problem.related[m] & s for m in bits(s))
    }
    assert set(independent_sets(problem, everyone, 100).tolist()) == wanted
