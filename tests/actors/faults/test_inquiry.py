"""Inspection of processes from outside: concurrently, and without delaying an error."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, RayActorError

from raymm.actors.faults import inquiry
from raymm.actors.faults.inquiry import LEAST_S, STOPPED, TIMES, Heartbeats, Inquiry
from raymm.actors.faults.stacks import Address, Look, look_at
from raymm.actors.faults.task_tracker import Report, TaskTracker
from raymm.kernels.collectives.waiting import waits_for_others
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Instruction, Op

HERE, THERE, GONE = ("here", "a" * 56, "b" * 56)  # node ids as Ray writes them
LOOKED = Look("sleeping", "its stacks")


class Cluster:
    """Ray with nodes that answer and some that do not."""

    def __init__(self, silent: set[str]) -> None:
        self.silent = silent
        self.calls: list[tuple[str, dict[int, Address], list[int], bool]] = []
        self.waits: list[float] = []

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: HERE)

    def remote(self, **options):
        def of(call):
            def options(scheduling_strategy):
                def remote(processes, end, look):
                    self.calls.append((scheduling_strategy.node_id, processes, end, look))
                    return self.calls[-1]

                return SimpleNamespace(remote=remote)

            return SimpleNamespace(options=options)

        return of

    def wait(self, refs, num_returns, timeout):
        self.waits.append(timeout)

    def get(self, ref, timeout):
        node, processes, end, look = ref
        if node in self.silent:
            raise GetTimeoutError("no answer")
        return inquiry.visit(processes, end, look)


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr(inquiry, "look_at", lambda address: LOOKED)
    monkeypatch.setattr(inquiry, "end_process", pids.append)
    return pids


def processes(nodes: list[str]) -> dict[int, Address]:
    return {number: Address(node, 1000 + number, 3) for number, node in enumerate(nodes)}


def test_processes_of_a_node_are_inspected_concurrently(monkeypatch, ended) -> None:
    """Check concurrency: each may take seconds, which add up on a node."""
    everybody = threading.Barrier(64, timeout=60)
    monkeypatch.setattr(inquiry, "ray", Cluster(set()))
    monkeypatch.setattr(inquiry, "look_at", lambda address: (everybody.wait(), LOOKED)[1])
    assert inquiry.look_from_outside(processes([HERE] * 64)) == dict.fromkeys(range(64), LOOKED)
    assert not ended


def test_nodes_are_queried_concurrently_with_a_timeout(monkeypatch, ended) -> None:
    cluster = Cluster({GONE})
    monkeypatch.setattr(inquiry, "ray", cluster)
    looks = inquiry.look_from_outside(
        processes([HERE, THERE, THERE, GONE, THERE, HERE]), end=[2, 3, 5]
    )
    assert set(looks) == {0, 1, 2, 4, 5}  # there is no information on unreachable ones
    asked = {node: (sorted(there), end) for node, there, end, _ in cluster.calls}
    assert asked == {THERE: ([1, 2, 4], [2]), GONE: ([3], [3])}  # one call per node
    assert len(cluster.waits) == 1 and cluster.waits[0] <= inquiry.LOOK_TIMEOUT_S <= 5
    assert sorted(ended) == [1002, 1005]  # the same call ends them: no process waits for another


def test_killing_inspects_no_process(monkeypatch, ended) -> None:
    cluster = Cluster(set())
    monkeypatch.setattr(inquiry, "ray", cluster)
    monkeypatch.setattr(inquiry, "look_at", lambda address: pytest.fail("looked"))
    inquiry.kill_from_outside(processes([HERE, THERE]), everywhere=False)
    assert ended == [1000] and not cluster.calls
    inquiry.kill_from_outside(processes([HERE, THERE]))
    assert sorted(ended) == [1000, 1000, 1001]


@pytest.mark.parametrize("signal", ["ABRT", "KILL", "SEGV"])
def test_a_process_that_aborted_is_recognised_by_its_log(signal, tmp_path) -> None:
    log = tmp_path / "worker.err"
    code = "import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), {})"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(f"signal.SIG{signal}")], stderr=errors
        )
        process.wait(60)
    assert look_at(Address(HERE, process.pid, 0, str(log))).aborted is (signal == "ABRT")
    assert not look_at(Address(HERE, process.pid, 0, "pipe:[7]")).aborted


def test_aborted_processes_are_blamed_last() -> None:
    """Try every state of three processes, where the first ended by SIGABRT."""
    error = RayActorError()
    states = ("dead", "silent", "computes", "waits")
    for second, third in itertools.product(states, repeat=2):
        others = {1: second, 2: third}
        reports = {
            n: Report("a step", 100.0, state == "waits")
            for n, state in others.items() if state in ("computes", "waits")
        }
        dead = {0: error, **{n: error for n, state in others.items() if state == "dead"}}
        silent = tuple(n for n, state in others.items() if state == "silent")
        culprits = Inquiry(reports, dead, silent).culprits(50.0, [0])
        ranks = sorted(others, key=lambda n: states.index(others[n]))
        assert culprits[-1] == 0
        assert culprits[0] == (0 if others[ranks[0]] == "waits" else ranks[0])
        assert Inquiry(reports, dead, silent).culprits(50.0)[0] == 0


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
