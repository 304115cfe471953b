"""Start of an embedded Ray: a cluster on this machine for one driver, which ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import node, ray_constants, services
from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

from raymm.errors import ClusterError
from raymm.runtime.embedded import cluster_guardian
from raymm.runtime.embedded.forked_workers import forked_workers, start_servers

# Ray waits some seconds for its servers, which may be too short on a busy machine at first.
ATTEMPTS = 2
# Environment of the raylet and its workers, unless it is set already. With niceness 15, Ray's
# default, other processes of the machine starve workers. The first driver waits for workers without
# a limit: if Ray gives up on the first two, after 60 s by default, it waits forever.
SETTINGS = {
    ray_constants.RAY_WORKER_NICENESS: "0", "RAY_worker_register_timeout_seconds": "600",
}
AUTH_MODE = "RAY_AUTH_MODE"
_guardian: subprocess.Popen | None = None


def start_embedded_ray(**options: Any) -> None:
    """Start Ray on this machine and connect to it.

    Its servers listen on the loopback interface only. They run in separate sessions, so signals to
    this process's group do not reach them, and end with this process however it ends.

    Raises:
        ClusterError: Ray does not start. The message has the cause and the folder of its logs.
    """
    _require_token()
    _start_guardian()
    start_servers()
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            with (
                _unhindered(), _on_loopback(), _in_sessions_of_their_own(), forked_workers(),
                nullcontext() if options.get("log_to_driver", True) else _without_log_monitor(),
            ):
                ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception as error:
            ray.shutdown()
            cluster_guardian.end_session(os.getpid())
            if not attempts_left:
                raise ClusterError(_did_not_come_up(error)) from error


def _require_token() -> None:
    """Require this user's token, because other users of the machine can reach the loopback
    interface."""
    if AUTH_MODE not in os.environ:
        os.environ[AUTH_MODE] = "token"
        Config.initialize("")  # Ray has read the environment in this process before


def _start_guardian() -> None:
    global _guardian
    if _guardian is None or _guardian.poll() is not None:
        _guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", cluster_guardian.__file__, str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd="/",
        )  # fmt: skip


@contextmanager
def _unhindered() -> Iterator[None]:
    added = [name for name in SETTINGS if name not in os.environ]
    os.environ.update({name: SETTINGS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Keep 127.0.0.1 as the address. Ray replaces it unless multi-node clusters are disabled."""
    setting = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = setting


@contextmanager
def _in_sessions_of_their_own() -> Iterator[None]:
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextmanager
def _without_log_monitor() -> Iterator[None]:
    """Start Ray without the log monitor, which polls the output of all workers."""
    start_log_monitor = node.Node.start_log_monitor
    node.Node.start_log_monitor = lambda self: None
    try:
        yield
    finally:
        node.Node.start_log_monitor = start_log_monitor


def _did_not_come_up(error: Exception) -> str:
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    sessions = sorted(folder.glob(f"session_*_{os.getpid()}"))
    logs = sessions[-1] / "logs" if sessions else folder
    return (
        f"an embedded Ray did not start on this machine: {type(error).__name__}: "
        f"{' '.join(str(error).split())} Its logs are in {logs} (gcs_server.out, raylet.out). "
        "Common causes are too little memory, a limit on processes, a full disk or a high load. "
        "Try again when the load is lower, set RAY_TMPDIR to a folder with free space, or set "
        "RAY_ADDRESS to a running cluster"
    )
