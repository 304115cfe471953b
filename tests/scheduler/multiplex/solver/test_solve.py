"""The solver: strategies compared with brute force, each other, and themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.mapping_instances import KINDS, random_problem
from raymm.errors import PlanError
from raymm.scheduler.multiplex.solver import solve as solving
from raymm.scheduler.multiplex.solver.exact import (
    alone_in_slot,
    in_order,
)
from raymm.scheduler.multiplex.solver.solve import (
    AUTO,
    STRATEGIES,
    merge_greedily,
    mergeable,
    solve,
)
from raymm.scheduler.multiplex.solver.stage_evaluation import StageEvaluator
from tests.support.cp_sat_stage import CpSatStageEvaluator
from tests.support.mapping_problems import (
    brute_force_mapping,
    brute_force_stage,
    problems,
)


@settings(max_examples=4)
@given(problems(most=4, pools=(1, 2, 3), steps=(2,)))
def test_exact_is_the_best_of_all(problem) -> None:
    least = brute_force_mapping(problem)
    for strategy in ("auto", "exact"):
        found = solve(problem, strategy)
        found.check(problem)
        assert found.optimal and math.isclose(found.seconds, least, rel_tol=1e-9)
    for strategy in ("greedy", "local_search"):
        found = solve(problem, strategy)
        found.check(problem)
        assert found.bound <= least * (1 + 1e-9) <= found.seconds * (1 + 2e-9)


class _BruteForce:
    """StageEval by brute force, without a bound for pruning."""

    def __init__(self, problem) -> None:
        self.problem, self.results = problem, {}

    def result(self, stage: int):
        from raymm.scheduler.multiplex.solver.stage_evaluation import StageResult

        if stage not in self.results:
            seconds = brute_force_stage(self.problem, stage)
            self.results[stage] = StageResult(seconds, seconds)
        return self.results[stage]

    def forget(self) -> None:
        self.results.clear()

    def known_bound(self, stage: int) -> float:
        return 0.0


@given(problems(most=4, pools=(1, 2, 3), steps=(2,)))
def test_greedy_is_equal_on_every_evaluator(problem) -> None:
    """Compare Algorithm 1 with brute force, and with pruning and caching on and off."""
    oracle = _BruteForce(problem)
    wanted = sum(oracle.result(stage).seconds for stage in merge_greedily(oracle, prune=False))
    for prune in (False, True):
        for cache in (False, True):
            evaluator = StageEvaluator(problem)
            stages = merge_greedily(evaluator, prune=prune, cache=cache)
            assert in_order(problem, stages) == stages
            seconds = sum(evaluator.result(stage).seconds for stage in stages)
            assert seconds == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_pruning_and_caching_change_nothing(kind: str, seed: int) -> None:
    problem = random_problem(seed, kind, 7, 8)
    found, searches = [], []
    for prune, cache in ((False, False), (False, True), (True, False), (True, True)):
        evaluator = StageEvaluator(problem, nodes=50_000)
        found.append(merge_greedily(evaluator, prune=prune, cache=cache))
        searches.append(evaluator.searches)
    assert all(stages == found[0] for stages in found)
    assert searches[3] < searches[0] and searches[3] <= searches[1]


def test_greedy_on_cp_sat_is_the_same() -> None:
    for seed, kind in ((0, "layered"), (1, "star")):
        problem = replace(random_problem(seed, kind, 5, 4), steps=4, memory_bytes=None)
        printed = merge_greedily(CpSatStageEvaluator(problem))
        assert printed == merge_greedily(StageEvaluator(problem))


def test_a_merge_must_leave_an_order() -> None:
    problem = random_problem(0, "parallel", 6, 8)
    problem = replace(problem, edges=(("m0", "m1"), ("m1", "m2"), ("m3", "m4")))
    pairs = mergeable(problem, alone_in_slot(problem))
    assert (0b1, 0b100) not in pairs  # through m1
    assert (0b1, 0b1000) in pairs
    # m0 + m4 and m1 + m3 each may, but not both.
    assert in_order(problem, [0b010001, 0b001010, 0b100, 0b100000]) is None
    crossed = [0b1000, 0b010001, 0b10, 0b100, 0b100000]
    assert (0b1000, 0b10) not in mergeable(problem, crossed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [8, 32])
def test_strategies_are_ordered_and_reproducible(kind: str, gpus: int) -> None:
    problem = random_problem(5, kind, 9, gpus)
    found = {s: solve(problem, s, seed=3) for s in ("greedy", "local_search", "auto")}
    for mapping in found.values():
        mapping.check(problem)
    assert found["auto"].seconds <= found["local_search"].seconds * (1 + 1e-12)
    assert found["local_search"].seconds <= found["greedy"].seconds * (1 + 1e-12)
    assert found["auto"].optimal
    assert all(m.bound <= found["auto"].seconds * (1 + 1e-12) for m in found.values())
    again = {s: solve(problem, s, seed=3) for s in found}
    assert again == found


def test_the_gap_is_reported_if_exact_is_infeasible() -> None:
    problem = random_problem(1, "parallel", 14, 8)
    effort = replace(AUTO, transitions=1000, kicks=1, rounds=1, nodes=2000)
    found = solve(problem, effort=effort)
    found.check(problem)
    assert "local search" in found.method and "partition program" in found.method
    assert 0 < found.bound <= found.seconds and found.gap < 0.3
    exact = solve(random_problem(1, "parallel", 8, 8), effort=replace(AUTO, transitions=10))
    wanted = solve(random_problem(1, "parallel", 8, 8))
    assert wanted.optimal and "dynamic programming" in wanted.method
    assert exact.bound <= wanted.seconds * (1 + 1e-9) <= exact.seconds * (1 + 2e-9)


@given(st.integers(0, 400))
@settings(max_examples=12)
def test_interruption_returns_the_best_so_far(after: int) -> None:
    problem = random_problem(2, "star", 10, 8)
    left = [after]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    found = solve(problem, stop=stop)
    found.check(problem)
    assert ("interrupted" in found.method) == (left[0] < 0)
    assert found.bound <= solve(problem).seconds * (1 + 1e-12)


def test_deadline_and_ctrl_c(monkeypatch) -> None:
    problem = random_problem(2, "parallel", 12, 8)
    found = solve(problem, deadline_seconds=0.0)
    found.check(problem)
    assert "interrupted" in found.method and len(found.stages) == 12

    def interrupt(*_args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(solving, "best_sequence", interrupt)
    found = solve(problem)
    found.check(problem)
    greedy = solve(problem, "greedy")
    assert "interrupted" in found.method and found.seconds == greedy.seconds


def test_wrong_arguments_are_refused() -> None:
    problem = random_problem(0, "parallel", 2, 8)
    with pytest.raises(PlanError, match="strategy is 'best'; accepted: auto, greedy"):
        solve(problem, "best")
    with pytest.raises(PlanError, match="seed is -1"):
        solve(problem, seed=-1)
    with pytest.raises(PlanError, match="deadline_seconds is -1"):
        solve(problem, deadline_seconds=-1)
    assert "auto" in STRATEGIES
