"""A node that announces its end and is vacated."""

import sys
from types import MappingProxyType

import pytest
from ray.core.generated import gcs_pb2

from raymm.runtime import leave_node
from raymm.runtime.leave_node import INSTANCE_VARIABLE, leave, main


class Cluster:
    """Client of a GCS whose node becomes empty after some looks."""

    def __init__(self, instance: str = "pod", looks: int = 3, accepts: bool = True) -> None:
        self._looks, self._accepts, self.drained = looks, accepts, []
        self._node = gcs_pb2.GcsNodeInfo(
            node_id=b"\x0a", instance_id=instance, state=gcs_pb2.GcsNodeInfo.ALIVE
        )

    def get_all_node_info(self, timeout: float):
        self._looks -= 1
        if self._looks < 0:
            self._node.state = gcs_pb2.GcsNodeInfo.DEAD
        return MappingProxyType({b"\x0a": self._node})

    def drain_node(self, node, reason, text, deadline_ms):
        self.drained.append((node, text))
        return self._accepts, "" if self._accepts else "it is the head"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(leave_node, "INTERVAL_S", 0.01)


def test_a_node_is_drained_until_it_is_empty() -> None:
    cluster = Cluster()
    assert leave(cluster, "pod", 60).startswith("node pod was vacated after ")
    assert cluster.drained == [("0a", "the pod pod ends")]


@pytest.mark.parametrize(("cluster", "seconds", "words"), [
    (Cluster("other"), 60, "the cluster has no node pod (any more)"),
    (Cluster(looks=0), 60, "the cluster has no node pod (any more)"),
    (Cluster(accepts=False), 60, "node pod could not be drained: it is the head"),
    (Cluster(looks=10**6), 0.05, "something still runs on node pod after 0.05 s"),
])  # fmt: skip
def test_every_other_end_is_said(cluster, seconds, words) -> None:
    assert leave(cluster, "pod", seconds) == words


def test_a_pod_without_a_name_does_not_fail(monkeypatch, capsys) -> None:
    monkeypatch.delenv(INSTANCE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["leave_node", "--seconds", "5"])
    assert main() == 0
    assert f"{INSTANCE_VARIABLE} is not set" in capsys.readouterr().err
