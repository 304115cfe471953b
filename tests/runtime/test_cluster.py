"""Connecting to clusters that are not there, or do not let a process in."""

from __future__ import annotations

import socket
import threading

import pytest

from raymm.actors.placement.placement import ClusterError
from raymm.runtime import cluster


@pytest.fixture
def no_session(monkeypatch):
    """No connected session, whatever other tests of this process have."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_dead_address_is_named_before_ray_waits(monkeypatch, no_session):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray would wait for minutes"))
    for connecting in (cluster.check_address, cluster.connect):
        with pytest.raises(ClusterError, match=f"'{address}'.*nothing accepts.*unset RAY_ADDRESS"):
            connecting()


def test_an_address_of_another_form_is_refused(monkeypatch, no_session):
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ClusterError, match="RAY_ADDRESS is 'head'.*Invalid address"):
        cluster.check_address()


def test_a_server_that_comes_up_is_waited_for(monkeypatch, no_session):
    port = free_port()
    monkeypatch.setattr(cluster, "CONNECT_S", 20.0)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    servers = []
    late = threading.Timer(
        1.0, lambda: servers.append(socket.create_server(("", port)))
    )
    late.start()
    cluster.check_address()
    servers[0].close()


@pytest.mark.parametrize(("mode", "cure"), [
    (None, "set RAY_AUTH_MODE=token"), ("token", "must be the cluster's"),
])
def test_a_cluster_that_wants_a_token_says_so(monkeypatch, no_session, mode, cure):
    """What Ray raises where the token is missing, as of a head of ``ray start``."""
    def refused(**_):
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(cluster.ray, "init", refused)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ClusterError, match=cure):
            cluster.connect()


def test_cuda_without_gpus_names_cpu(monkeypatch):
    monkeypatch.setattr(cluster, "reachable_resources", lambda: {"CPU": 4.0})
    with pytest.raises(ClusterError, match="run.device is 'cuda'.*run.device: cpu"):
        cluster.pick_device("cuda")
    assert cluster.pick_device("auto") == "cpu"
