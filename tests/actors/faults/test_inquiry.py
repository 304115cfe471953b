"""Looking at processes from outside: all at once, and an error does not wait long for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from raymm.actors.faults import inquiry
from raymm.actors.faults.stacks import Address, Look

HERE, THERE, GONE = ("here", "a" * 56, "b" * 56)  # as Ray writes ids of nodes
LOOKED = Look("sleeping", "its stacks")


class Cluster:
    """Ray, with nodes that answer and some that do not."""

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


def test_all_processes_of_a_node_are_looked_at_at_once(monkeypatch, ended) -> None:
    """Each may take seconds: one after another, a node's took minutes."""
    everybody = threading.Barrier(64, timeout=60)
    monkeypatch.setattr(inquiry, "ray", Cluster(set()))
    monkeypatch.setattr(inquiry, "look_at", lambda address: (everybody.wait(), LOOKED)[1])
    assert inquiry.look_from_outside(processes([HERE] * 64)) == dict.fromkeys(range(64), LOOKED)
    assert not ended


def test_nodes_are_asked_together_and_for_a_few_seconds(monkeypatch, ended) -> None:
    cluster = Cluster({GONE})
    monkeypatch.setattr(inquiry, "ray", cluster)
    looks = inquiry.look_from_outside(
        processes([HERE, THERE, THERE, GONE, THERE, HERE]), end=[2, 3, 5]
    )
    assert set(looks) == {0, 1, 2, 4, 5}  # and of those that are out of reach nothing is known
    asked = {node: (sorted(there), end) for node, there, end, _ in cluster.calls}
    assert asked == {THERE: ([1, 2, 4], [2]), GONE: ([3], [3])}  # one call to a node
    assert len(cluster.waits) == 1 and cluster.waits[0] <= inquiry.LOOK_TIMEOUT_S <= 5
    assert sorted(ended) == [1002, 1005]  # the same call ends them: nobody waits for another


def test_killing_looks_at_nobody(monkeypatch, ended) -> None:
    cluster = Cluster(set())
    monkeypatch.setattr(inquiry, "ray", cluster)
    monkeypatch.setattr(inquiry, "look_at", lambda address: pytest.fail("looked"))
    inquiry.kill_from_outside(processes([HERE, THERE]), everywhere=False)
    assert ended == [1000] and not cluster.calls
    inquiry.kill_from_outside(processes([HERE, THERE]))
    assert sorted(ended) == [1000, 1000, 1001]
