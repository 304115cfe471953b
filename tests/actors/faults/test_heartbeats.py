"""Slow processes are detected by their earlier durations; processes that wait are not blamed."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.faults.heartbeats import LEAST_S, STOPPED, TIMES, Heartbeats
from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Look
from raymm.actors.faults.task_tracker import Report, TaskTracker
from raymm.kernels.collectives.waiting import waits_for_others
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Instruction, Op

PATIENCE_S = 300.0
seconds = st.floats(0.0, 400.0)
reports = st.builds(
    lambda kind, since, waits, longest: Report(kind, since, waits, kind=kind, longest=longest),
    st.sampled_from(["forward", "send", ""]), seconds, st.booleans(),
    st.dictionaries(st.sampled_from(["forward", "send"]), seconds),
)


def nobody(_):
    pytest.fail("looked at processes that answer")


def in_forward(since: float, longest: float | None = None, waits: bool = False) -> Report:
    seen = {} if longest is None else {"forward": longest}
    return Report("forward llm.0", since, waits, kind="forward", longest=seen)


@given(st.dictionaries(st.integers(0, 3), reports, max_size=4))
def test_only_tasks_beyond_their_own_limit_are_overdue(said):
    """Compare with the limit, spelt out, and the process furthest beyond its own."""
    over = {}
    for number, report in said.items():
        if report.kind and not report.waits:
            before = report.longest.get(report.kind)
            most = PATIENCE_S + 2.0  # a waiting process reports so earlier
            limit = most if before is None else min(most, max(10.0, 5.0 * before))
            if report.seconds + 1.0 >= limit:
                over[number] = report.seconds / limit
    found = Heartbeats(PATIENCE_S).overdue(Inquiry(said), 0.0, nobody)
    assert (found is None) == (not over)
    assert found is None or over[found.number] == max(over.values())


def test_earlier_durations_apply_to_successors_too():
    beats = Heartbeats(PATIENCE_S)
    assert beats.overdue(Inquiry({0: in_forward(1.0, longest=30.0)}), 0.0, nobody) is None
    assert beats.overdue(Inquiry({0: in_forward(100.0)}), 1.0, nobody) is None
    beats.replaced(0)
    found = beats.overdue(Inquiry({0: in_forward(30.0 * TIMES)}), 2.0, nobody)
    assert found is not None and found.number == 0 and "at most 30.00 s before" in found.why


def test_a_false_alarm_raises_the_limit():
    beats = Heartbeats(PATIENCE_S)
    assert beats.overdue(Inquiry({0: in_forward(12.0, longest=0.1)}), 0.0, nobody)
    beats.forget(0)
    assert beats.overdue(Inquiry({0: in_forward(200.0)}), 1.0, nobody) is None
    assert beats.overdue(Inquiry({0: in_forward(PATIENCE_S + 2.0)}), 2.0, nobody)


@pytest.mark.parametrize(("state", "found_after"), [(STOPPED, LEAST_S), ("computing", 50.0)])
def test_a_silent_process_is_lost(state, found_after):
    """Check that stopped processes are lost after ten seconds, and running ones survive.

    A process that may compute while it holds the interpreter's lock has as long as its own longest
    task allows.
    """
    beats = Heartbeats(PATIENCE_S)
    beats.overdue(Inquiry({0: in_forward(1.0, longest=10.0)}), 0.0, nobody)
    silent, now = Inquiry(silent=(0,)), 0.0

    def look(numbers):
        return {number: Look(state, "") for number in numbers}

    while beats.overdue(silent, now, look) is None:
        now += 1.0
    assert found_after - 3 <= now <= found_after
    beats.overdue(Inquiry({0: in_forward(1.0)}), now, nobody)
    assert beats.overdue(silent, now + 1.0, look) is None


def test_background_threads_are_observed_too():
    report = Report("", 0.0, False, longest={"writing": 1.0}, in_threads={"writing": 11.0})
    found = Heartbeats(PATIENCE_S).overdue(Inquiry({2: report}), 0.0, nobody)
    assert found is not None and found.number == 2 and "writing" in found.why


def test_first_forward_of_a_stage_may_take_long():
    """Allow time for compilation, even if another stage of the process has had a forward."""
    where = TaskTracker()
    with where.during("a step"):
        where.enter(Instruction(Op.FORWARD, StageId("vision", 0), 0))
        where.enter(Instruction(Op.FORWARD, StageId("llm", 0), 0))
        report = where.report()
        assert report.kind == "forward llm.0" and "forward vision.0" in report.longest
        report = report._replace(seconds=12.0)
        assert Heartbeats(60.0).overdue(Inquiry({0: report}), 0.0, nobody) is None
        where.enter("the end of a step")
        assert "forward llm.0" in where.report().longest


def test_the_task_tracker_keeps_longest_tasks_and_waits():
    where = TaskTracker()
    with where.during("a step"), where.in_thread("writing"):
        where.enter("forward")
        time.sleep(0.02)
        where.enter("backward")
        report = where.report()
    assert report.longest["forward"] >= 0.02 > report.longest["a step"]
    assert report.kind == "backward" and report.in_threads["writing"] >= 0.02 and not report.waits
    assert set(where.report().longest) == {"a step", "forward", "backward", "writing"}
    there = threading.Condition()

    @waits_for_others
    def waits():
        with there:
            there.wait(10.0)

    def work():
        with where.during("receiving"):
            waits()

    thread = threading.Thread(target=work)
    thread.start()
    while not where.report().waits:
        time.sleep(0.01)
    with there:
        there.notify()
    thread.join()
