"""The least seconds of a stage, compared with all placements and CP-SAT, and their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.mapping_instances import random_problem
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.solver.packing import IMPOSSIBLE
from raymm.scheduler.multiplex.solver.stage_evaluation import StageBounds, StageEvaluator
from tests.support.cp_sat_stage import CpSatStageEvaluator
from tests.support.mapping_problems import brute_force_stage, problems


def same(found: float, wanted: float) -> bool:
    return found == wanted or math.isclose(found, wanted, rel_tol=1e-9)


@given(problems(most=3, edges=False))
def test_search_finds_the_least_seconds(problem) -> None:
    stage = (1 << len(problem.names)) - 1
    evaluator = StageEvaluator(problem)
    result = evaluator.result(stage)
    least = brute_force_stage(problem, stage)
    assert result.exact and same(result.seconds, least)
    assert StageBounds(problem).bound(stage) <= least * (1 + 1e-12)
    if result.placements:
        # Validates quotas, degrees and GPUs.
        Mapping(problem.gpus, problem.steps, (MultiplexStage(result.placements, least),))


@settings(max_examples=15)
@given(problems(most=4, pools=(3, 4), steps=(2,), edges=False))
def test_search_finds_the_least_seconds_of_four(problem) -> None:
    stage = (1 << len(problem.names)) - 1
    assert same(StageEvaluator(problem).result(stage).seconds, brute_force_stage(problem, stage))


@given(problems(most=3, edges=False), st.floats(0.5, 1.5))
def test_the_probe_decides_if_a_stage_is_faster(problem, factor: float) -> None:
    stage = (1 << len(problem.names)) - 1
    least = brute_force_stage(problem, stage)
    below = factor * (least if math.isfinite(least) else 1.0)
    found = StageEvaluator(problem).probe(stage, below)
    if least < below * (1 - 1e-9):
        assert found.seconds < below
    if least > below * (1 + 1e-9):
        assert found.bound >= below and not found.seconds < below
    assert found.bound <= least * (1 + 1e-9)


@settings(max_examples=15)
@given(problems(most=3, pools=(2, 3), steps=(2, 3), edges=False))
def test_cp_sat_agrees(problem) -> None:
    stage = (1 << len(problem.names)) - 1
    found = CpSatStageEvaluator(problem).result(stage)
    assert same(found.seconds, StageEvaluator(problem).result(stage).seconds)


def test_sets_of_gpus_need_not_be_aligned() -> None:
    """Place three modules pairwise on three GPUs, which leaves the fourth free.

    Aligned halves would not.
    """
    from raymm.scheduler.costs.surface import ScalingSurface
    from raymm.scheduler.multiplex.problem import MappingProblem

    def only(name: str, degree: int, quota: int) -> ScalingSurface:
        return ScalingSurface(name, (degree,), (quota,), 2, ((1.0,),), (0,), (0.1,))

    problem = MappingProblem(
        (only("a", 2, 1), only("b", 2, 1), only("c", 2, 1), only("d", 1, 2)), (), 4, 2
    )
    result = StageEvaluator(problem).result(0b1111)
    assert result.seconds == 1.0 and result.exact


def test_product_that_falls_with_a_third_module_is_used() -> None:
    """Check that eq. 8 is not monotone: a third module reduces the interference of two."""
    from raymm.scheduler.costs.interference import Interference
    from raymm.scheduler.costs.surface import ScalingSurface
    from raymm.scheduler.multiplex.problem import MappingProblem

    surfaces = tuple(
        ScalingSurface(name, (1,), (1,), 3, ((1.0,),), (0,), (use,))
        for name, use in (("a", 0.8), ("b", 0.8), ("c", 0.1), ("d", 0.1))
    )
    problem = MappingProblem(surfaces, (), 1, 3, None, Interference(0.0, 0.0, 1.0))
    evaluator = StageEvaluator(problem)
    assert evaluator.result(0b0011).seconds == pytest.approx(1.64)
    assert evaluator.result(0b0111).seconds == pytest.approx(1.064)
    assert evaluator.result(0b1111).bound == np.inf  # four of three steps


@pytest.mark.parametrize(("gpus", "seed"), [(8, 0), (8, 3), (32, 1)])
def test_bounds_of_large_stages(gpus: int, seed: int) -> None:
    problem = random_problem(seed, "parallel", 12, gpus)
    evaluator = StageEvaluator(problem)
    stage = (1 << 12) - 1
    first = evaluator.result(stage)
    better = evaluator.refined(stage, 100_000)
    assert first.bound <= better.bound <= better.seconds <= first.seconds
    stages = np.arange(1, 1 << 12)
    many = evaluator.bounds.bounds(stages)
    some = np.random.default_rng(seed).integers(0, len(stages), 50)
    assert [evaluator.bounds.bound(int(stages[i])) for i in some] == many[some].tolist()
    # More modules never need less.
    assert (many[stages & (stages - 1) > 0] >= many[(stages & (stages - 1))[
        stages & (stages - 1) > 0] - 1]).all()
    assert IMPOSSIBLE == evaluator._search(stage, better.bound, 1_000_000)
