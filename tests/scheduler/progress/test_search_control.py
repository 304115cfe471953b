"""A search that is ended early returns the best plan so far, and its progress."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.progress.search_control import EVERY, SearchControl
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import find_plans

POWERS = (1, 2, 4)
GRAPH = ModuleGraph((ModuleNode("vision", (True,) * 6), ModuleNode("llm", (True,) * 8)),
                    (("vision", "llm"),))
LAYER = LayerCost(1.0, 1.0, 1.0, 4000, 1000, 8, 100, 4)
PROFILE = CostProfile({"vision": (LAYER,) * 6, "llm": (LAYER,) * 8})
PROBLEM = PlanProblem(
    GRAPH, PROFILE, 12, 8, memory_limit=80_000,
    network=Network(Link(1e-3, 1e3), Link(1e-2, 1e2), 4),
    degrees={name: DegreeChoices(POWERS, POWERS, POWERS) for name in ("vision", "llm")},
)


class Clock:
    """Clock that advances by a step at every reading."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class AfterPlans(SearchControl):
    """Search control that acts once so many plans were tried."""

    def __init__(self, plans: int, action: Callable[[], None]) -> None:
        super().__init__()
        self.plans, self.action = plans, action

    def tried(self) -> None:
        super().tried()
        if self.state.tried == self.plans:
            self.action()


@cache
def whole_search() -> tuple[float, int]:
    """Return the seconds of the best plan, and the number of tried plans."""
    control = SearchControl()
    best = find_plans(PROBLEM, control=control).best.seconds
    return best, control.state.tried


def test_lines_report_the_search_and_the_best_plan():
    lines: list[str] = []
    clock = Clock(EVERY / 8)
    find_plans(PROBLEM, control=SearchControl(say=lines.append, clock=clock))
    assert 2 <= len(lines) <= 1 + clock.now / EVERY
    assert lines[0].split()[2:4] == ["searching", "modality_parallel;"]
    assert any("searching degrees" in line and " plans tried, best " in line for line in lines)
    assert "of it" in lines[-1]


def test_lines_before_the_first_plan_are_few():
    lines: list[str] = []
    clock = Clock(0.1)
    control = SearchControl(say=lines.append, clock=clock)
    while clock.now < 60:
        control.should_stop()
    assert len(lines) <= 9
    assert {line.partition(": ")[2] for line in lines} == {"searching plans; no plan tried yet"}
    control.tried()
    assert control.state.line.endswith("; 1 plan tried, none fits yet")


def test_a_limit_that_has_passed_evaluates_a_single_plan():
    """Check that neither bounds nor further schedules are computed after the limit."""
    control = SearchControl(0.5, clock=Clock(1.0))
    for ranks in (12, 200):
        control.begin()
        find_plans(replace(PROBLEM, ranks=ranks, num_microbatches=64), control=control)
    assert control.state.tried <= 4


@pytest.mark.cells(2)
@pytest.mark.parametrize("plans", [2, 5, 12])
def test_ctrl_c_ends_with_the_best_so_far(plans: int):
    best, tried = whole_search()
    control = AfterPlans(plans, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with control.interruptible():
        proposal = find_plans(PROBLEM, control=control)
    assert signal.getsignal(signal.SIGINT) is before
    assert control.stopped == "Ctrl-C"
    assert control.state.best == proposal.best.seconds >= best
    assert control.state.tried <= plans + 3 < tried
    assert max(need.total for need in proposal.best.memory) <= 80_000


def test_the_time_limit_ends_with_the_best_so_far():
    best, tried = whole_search()
    control = SearchControl(30.0, clock=Clock(1.0))
    proposal = find_plans(PROBLEM, control=control)
    assert control.stopped == "the time limit of 30 s"
    assert control.state.best == proposal.best.seconds >= best
    assert control.state.tried < tried


def test_a_time_limit_waits_for_the_first_plan():
    """Wait for the first plan after a time limit, but not after Ctrl-C."""
    control = SearchControl(0.5, clock=Clock(1.0))
    proposal = find_plans(PROBLEM, control=control)
    assert control.state.best == proposal.best.seconds and control.state.tried <= 3
    with pytest.raises(KeyboardInterrupt), SearchControl().interruptible():
        signal.raise_signal(signal.SIGINT)


def test_the_second_ctrl_c_ends_the_program():
    control = SearchControl()
    control.fits(1.0, str)
    with pytest.raises(KeyboardInterrupt), control.interruptible():
        signal.raise_signal(signal.SIGINT)
        assert control.should_stop()
        signal.raise_signal(signal.SIGINT)


def test_a_resumed_search_continues_to_its_next_plan():
    """Find that the best plan does not run, after the limit."""
    control = SearchControl(30.0, clock=Clock(1.0))
    find_plans(PROBLEM, control=control)
    control.begin()
    assert not control.should_stop() and control.state.best is None
    proposal = find_plans(PROBLEM, control=control)
    assert control.state.best == proposal.best.seconds
    assert control.should_stop()
