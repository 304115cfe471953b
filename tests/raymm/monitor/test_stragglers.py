"""Stragglers are detected by the spans of steps: with a profile, without, and in replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.monitor import stragglers
from raymm.monitor.observed_run import WARM_UP_STEPS
from raymm.monitor.stragglers import BASELINE_STEPS, STEPS, TIMES, StragglerFinder
from raymm.monitor.stragglers import StragglerObserver as Observer
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds

LAYERS = 4
PROFILE = CostProfile({"llm": (LayerCost(0.1, 0.1, 0.1),) * LAYERS})


def plan_of(replicas: int = 1, profile: CostProfile | None = PROFILE, tp: int = 1) -> Plan:
    graph = ModuleGraph((ModuleNode("llm", (True,) * LAYERS),), ())
    stages = tuple(
        Stage("llm", index, (2 * index, 2 * index + 2), 2 * replica + index, replica, tp=tp)
        for replica in range(replicas) for index in range(2)
    )
    return Plan(graph, stages, 2 * replicas, profile=profile)


def step(replicas: int, times: dict[int, float]):
    """Return a step in which ranks take multiples of their planned times."""
    plan = plan_of(replicas)
    costs = {
        key: seconds * times.get(plan.by_id[key[0]].rank, 1.0)
        for key, seconds in op_seconds(plan).items()
    }
    return simulate(full_program(plan), costs)


@given(st.sampled_from([1, 2]), st.data())
def test_the_slowest_rank_is_furthest_from_its_plan(replicas, data):
    """Compare with the ratios of the ranks, spelt out."""
    times = [data.draw(st.floats(0.5, 4.0)) for _ in range(2 * replicas)]
    found = StragglerFinder(plan_of(replicas)).slowest(step(replicas, dict(enumerate(times))))
    assert found is not None
    worst = max(times)
    rest = sorted(times)[:-1]
    middle = (rest[(len(rest) - 1) // 2] + rest[len(rest) // 2]) / 2
    assert times[found.rank] == pytest.approx(worst)
    assert found.times == pytest.approx(worst / middle)


def test_a_straggler_is_slow_for_many_consecutive_steps():
    finder, slow, even = StragglerFinder(plan_of()), step(1, {1: TIMES + 0.1}), step(1, {})
    for _ in range(WARM_UP_STEPS + STEPS - 1):
        assert finder.observe(slow) is None
    assert finder.observe(even) is None
    for _ in range(STEPS - 1):
        assert finder.observe(slow) is None
    found = finder.observe(slow)
    assert found is not None and found.rank == 1
    assert StragglerFinder(plan_of()).observe(step(1, {0: 9.0, 1: 9.0})) is None


def test_a_whole_machine_that_is_slow_has_no_straggler():
    finder = StragglerFinder(plan_of())
    assert all(finder.observe(step(1, {0: 5.0, 1: 5.0})) is None for _ in range(3 * STEPS))


@pytest.mark.parametrize("from_the_beginning", [False, True])
def test_without_a_profile_ranks_are_compared_with_replicas(from_the_beginning):
    replicas = 2
    finder, slow = StragglerFinder(plan_of(replicas, None)), step(replicas, {2: 3.0})
    first = slow if from_the_beginning else step(replicas, {})
    for _ in range(WARM_UP_STEPS + BASELINE_STEPS):
        assert finder.observe(first) is None
    found = [finder.observe(slow) for _ in range(STEPS)]
    assert found[:-1] == [None] * (STEPS - 1) and found[-1] is not None
    assert found[-1].rank == 2 and found[-1].times == pytest.approx(3.0)


def test_one_that_was_replaced_and_is_slow_again_stays(monkeypatch):
    monkeypatch.setattr(stragglers, "STEPS", 3)
    lines: list[str] = []
    observer, slow = Observer(plan_of(), lines.append), step(1, {1: 2.0})
    found = None
    for number in range(WARM_UP_STEPS + 3):
        assert observer.replaceable() is None
        found = observer.after_step(number, slow)
    assert found == {"straggler": {"rank": 1, "times": 2.0}}
    replaceable = observer.replaceable()
    assert replaceable is not None and replaceable[0] == 1 and "2.0 times" in replaceable[1]
    observer.replaced()
    rows = [observer.after_step(number, slow) for number in range(3)]
    assert rows[:2] == [{}, {}] and rows[2] and observer.replaceable() is None
    assert len(lines) == 2 and all("straggler: rank 1" in line for line in lines)


@pytest.mark.parametrize("slow_process", [3, 4, 5, None])
def test_processes_are_replaced_until_a_rank_is_fast(monkeypatch, slow_process):
    """Replace processes up to the slow one, or all of them if each is equally slow."""
    monkeypatch.setattr(stragglers, "STEPS", 3)
    plan = plan_of(tp=3)
    observer, slow, even = Observer(plan, lambda line: None), step(1, {1: 2.0}), step(1, {})
    slowed, replaced = {3, 4, 5} if slow_process is None else {slow_process}, []
    for number in range(WARM_UP_STEPS + 5 * 3):
        observer.after_step(number, slow if slowed else even)
        if (found := observer.replaceable()) is not None:
            replaced.append(found[0])
            assert f"{len(replaced)} of 3 processes in turn" in found[1] and "rank 1" in found[1]
            observer.replaced()
            slowed -= set() if slow_process is None else {found[0]}
    assert replaced == [n for n in (3, 4, 5) if slow_process is None or n <= slow_process]


def test_kinds_are_equal_on_all_replicas():
    ids = [StageId("llm", 1, replica) for replica in range(2)]
    assert {stragglers._kind(each, None) for each in ids} == {("llm", 1, None)}
