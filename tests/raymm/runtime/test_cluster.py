"""Connections to clusters that do not exist, or reject a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymm.errors import ClusterError
from raymm.runtime import cluster
from raymm.runtime.embedded import embedded_ray


@pytest.fixture
def no_session(monkeypatch):
    """Simulate a process without a connected session, whatever other tests have done."""
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
    (None, "set RAY_AUTH_MODE=token"), ("token", "use the cluster's token"),
])
def test_a_cluster_that_requires_a_token_reports_it(monkeypatch, no_session, mode, cure):
    """Raise Ray's error for a missing token, as from a head of ``ray start``."""
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


def test_an_embedded_ray_requires_a_token(ray_cluster, monkeypatch):
    """Check the tests' cluster, too: a process without a token is rejected."""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    client = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    for mode in ("token", "disabled"):
        child = subprocess.run(
            [sys.executable, "-c", client, ray_cluster.get_runtime_context().gcs_address],
            env={
                **os.environ, "RAY_AUTH_MODE": mode, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_gcs_rpc_server_connect_timeout_s": "1",
            },
            capture_output=True, text=True, timeout=100,
        )
        assert (child.returncode == 0) == (mode == "token"), child.stderr


def test_an_embedded_ray_waits_for_slow_workers(ray_cluster):
    """Raise the limit: by default the raylet gives up after a minute, and the driver waits forever.
    """
    (raylet,) = ray_cluster._private.worker.global_worker.node.all_processes["raylet"]
    environment = Path(f"/proc/{raylet.process.pid}/environ").read_text().split("\0")
    assert {f"{name}={value}" for name, value in embedded_ray.SETTINGS.items()} <= {*environment}


def test_a_users_authentication_mode_is_kept(monkeypatch):
    initialized = []
    monkeypatch.setattr(embedded_ray, "Config", SimpleNamespace(initialize=initialized.append))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    embedded_ray._require_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and not initialized
    monkeypatch.delenv("RAY_AUTH_MODE")
    embedded_ray._require_token()
    assert os.environ["RAY_AUTH_MODE"] == "token" and initialized == [""]


def test_cuda_without_gpus_names_cpu(monkeypatch):
    monkeypatch.setattr(cluster, "reachable_resources", lambda: {"CPU": 4.0})
    with pytest.raises(ClusterError, match="run.device is 'cuda'.*set run.device to cpu"):
        cluster.pick_device("cuda")
    assert cluster.pick_device("auto") == "cpu"
