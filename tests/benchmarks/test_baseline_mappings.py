"""Mappings of Megatron-LM, DistMM and Spindle: valid, and never below the solver's bound."""

from __future__ import annotations

import pytest
from hypothesis import given

from benchmarks.baselines.mappings import distmm, megatron, spindle
from benchmarks.shared.mapping_instances import KINDS, random_problem
from raymm.errors import PlanError
from raymm.scheduler.multiplex.solver.solve import solve
from tests.support.mapping_problems import problems


@pytest.mark.cells(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("modules", "gpus"), [(6, 8), (10, 4), (12, 32)])
def test_baselines_are_mappings_and_not_better(kind: str, modules: int, gpus: int) -> None:
    problem = random_problem(4, kind, modules, gpus)
    ours = solve(problem)
    for baseline in (megatron, distmm):
        mapping = baseline(problem)
        mapping.check(problem)
        assert mapping.seconds >= ours.bound * (1 - 1e-9)
    sliced = spindle(problem)
    sliced.check(problem)
    assert sliced.slices == 24
    # One module at a time on each GPU.
    for mapping in (megatron(problem), distmm(problem), sliced):
        for stage in mapping.stages:
            used = [g for placement in stage.placements for g in placement.gpus]
            assert len(used) == len(set(used))
    assert len(megatron(problem).stages) == modules
    # With at least as many GPUs as modules, DistMM has one stage per level.
    if gpus >= modules:
        assert len(distmm(problem).stages) == len(problem.levels)


@given(problems(most=4, pools=(1, 2, 4), steps=(2, 3)))
def test_baselines_of_any_problem(problem) -> None:
    for baseline in (megatron, distmm, spindle):
        baseline(problem).check(problem)


def test_spindle_slices_are_whole_layers() -> None:
    problem = random_problem(1, "star", 7, 8)
    layers = {name: (1, 2, 3, 4, 6, 8, 36)[m] for m, name in enumerate(problem.names)}
    made = spindle(problem, layers=layers)
    made.check(problem)
    assert made.slices == 72
    for stage in made.stages:
        for one in stage.placements:
            assert one.slices % (made.slices // layers[one.module]) == 0
    with pytest.raises(PlanError, match="layers of m0 is 0"):
        spindle(problem, layers={"m0": 0})
    assert spindle(problem, 1).slices == 1
