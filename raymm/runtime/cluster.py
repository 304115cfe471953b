"""Connection to Ray: to an existing cluster, or to an embedded one on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._common.network_utils import parse_address  # pyright: ignore[reportAttributeAccessIssue]
from ray._private import services
from ray.exceptions import RayError
from ray.util.client import ray as ray_client

from raymm.actors.placement.node_types import reachable_resources
from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import ClusterError
from raymm.runtime.embedded.embedded_ray import start_embedded_ray

# Seconds in which a cluster's server must accept a connection, and seconds between two attempts.
CONNECT_S, RETRY_S = 8.0, 0.5


def connect(quiet: bool = True) -> bool:
    """Connect to the cluster at ``RAY_ADDRESS`` (set inside ``ray job submit``), keep an existing
    session, or start an embedded Ray on this machine.

    Args:
        quiet: True to not repeat the output of actors in this process.

    Returns:
        True if an embedded Ray was started, which the caller should shut down in the end.

    Raises:
        ClusterError: there is no cluster at ``RAY_ADDRESS``, it is the address of a Ray Client, or
            an embedded Ray does not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    refused = (address or "").startswith("ray://") and not ray.is_initialized()
    if refused or ray_client.is_connected():
        raise ClusterError(
            f"RAY_ADDRESS is {address!r}, but raymm cannot drive ranks through a Ray Client "
            "(ray://); run this inside the cluster: with RAY_ADDRESS=auto on one of its machines "
            "(for example in a notebook on the head pod), or with `ray job submit`"
        )
    if ray.is_initialized():
        return False
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for import paths in configs; ranks have it, too
    # Report the error of one rank once; ranks that lost it would each add a traceback.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    embedded = address in (None, "", "local")
    handler = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": not quiet, "logging_level": "ERROR"}
    if embedded:
        start_embedded_ray(**options)
    else:
        _connect_to(str(address), options)
    if threading.current_thread() is threading.main_thread():
        # ray.init() makes SIGTERM raise SystemExit, and then replaces that handler by one of its
        # C++ side, which aborts the process three seconds later, in the middle of an orderly
        # shutdown.
        ours = callable(handler) or handler is signal.SIG_IGN
        signal.signal(signal.SIGTERM, handler if ours else signal.getsignal(signal.SIGTERM))
    return embedded


def check_address() -> None:
    """Check that a server listens at ``RAY_ADDRESS`` if it names another cluster. Ray itself would
    wait for minutes.

    Raises:
        ClusterError: no server accepts connections within :data:`CONNECT_S` seconds.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local") or address.startswith("ray://") or ray.is_initialized():
        return
    try:
        resolved = services.canonicalize_bootstrap_address(address)
        host, port = parse_address(resolved or "") or ("", 0)
        _wait_for_server(host, int(port))
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"RAY_ADDRESS is {address!r}; cannot connect: {error}. Start the cluster (ray start "
            "--head), give the address that `ray status` prints on its machine, or unset "
            "RAY_ADDRESS to use this machine"
        ) from None


def _connect_to(address: str, options: dict[str, Any]) -> None:
    check_address()
    try:
        ray.init(**options)
    except (ConnectionError, TimeoutError, RuntimeError, RayError) as error:
        if os.environ.get("RAY_AUTH_MODE") == "token":
            cure = (
                "use the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN, and the same "
                "version of Ray"
            )
        else:
            cure = (
                "`ray start` enables token authentication: set RAY_AUTH_MODE=token, with the "
                "cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            )
        raise ClusterError(
            f"RAY_ADDRESS is {address!r}; cannot connect: {error}. A server listens there, but "
            f"does not accept this process; {cure}"
        ) from None


def _wait_for_server(host: str, port: int) -> None:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            timeout = max(1.0, deadline - time.monotonic())
            socket.create_connection((host, port), timeout=timeout).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise ConnectionError(
                    f"nothing accepts connections at {host}:{port} ({error})"
                ) from None
        time.sleep(RETRY_S)


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray (:func:`connect`) for a block; shut an embedded Ray down at its end."""
    embedded = connect()
    try:
        yield
    finally:
        if embedded:
            ray.shutdown()


def pick_device(
    device: str, resources: Callable[[str], RankResources] | None = None
) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for a device setting.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        resources: returns the resources of a rank for a device. They decide ``"auto"``: CUDA if a
            rank on ``"cpu"`` reserves GPUs, CPU if a rank on ``"cuda"`` reserves none. Otherwise,
            and by default, CUDA is chosen if the cluster has GPUs or its autoscaler can add some.

    Raises:
        ClusterError: the setting is ``"cuda"`` and ranks reserve GPUs, but the cluster has none.
    """
    reserves = resources is None or resources("cuda").gpus  # else ranks find GPUs themselves
    if device == "cuda" and reserves and reachable_resources().get("GPU", 0) < 1:
        raise ClusterError(
            "run.device is 'cuda', but no node of the cluster has a GPU and the autoscaler cannot "
            "add one; set run.device to cpu or auto"
        )
    if device != "auto":
        return device
    if resources is not None:
        if resources("cpu").gpus:
            return "cuda"
        if not resources("cuda").gpus:
            return "cpu"
    return "cuda" if reachable_resources().get("GPU", 0) >= 1 else "cpu"
