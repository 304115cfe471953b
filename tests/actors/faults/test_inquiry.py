"""Inspection of processes from outside: concurrently, and without delaying an error."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from raymm.actors.faults import inquiry
from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Address, Look, look_at
from raymm.actors.faults.task_tracker import Report

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
