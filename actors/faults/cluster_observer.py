"""Observer that detects the loss of the cluster under a run.

Ray reports a lost node server (raylet) after about 15 s, during which the node's processes
continue. Without the cluster's control server (GCS), Ray ends this process after a minute. A run
needs neither for its steps, so it would not notice, and would fail at its end. Both servers listen
on TCP ports: if the host refuses the connection, the server is gone.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import NamedTuple

import ray
from ray._private import worker
from ray.exceptions import RayError

# Seconds between two checks.
INTERVAL_S = 1.0
# Seconds between the two checks of a node that refuses connections or whose process has died. When
# a whole node is killed, the node server may die before or after its processes.
BOTH_LOOKS_S = 0.2
# Timeout for a connection and for the GCS's answer, in seconds.
ANSWER_TIMEOUT_S = 5.0
# Consecutive refused connections after which a server counts as gone: it may be restarting.
REFUSALS = 2
# Seconds without the GCS after which a run ends, also if its port refuses connections: clusters can
# be configured to restart it. After 60 s Ray would end this process without a message.
GCS_TIMEOUT_S = 20.0


class Server(NamedTuple):
    """Address of a Ray server, with the name that errors give it."""
    host: str
    port: int
    name: str


class ClusterObserver:
    """Observes the Ray servers that a run needs, in a daemon thread.

    Args:
        nodes: Ray ids of the nodes; empty to observe the GCS only.

    Attributes:
        lost: message that says what was lost; None if nothing was.
        gcs_is_lost: True if calls that change the cluster would hang.
    """

    def __init__(self, nodes: Collection[str]) -> None:
        self.nodes = frozenset(nodes)
        self.lost: str | None = None
        self.lost_nodes: frozenset[str] = frozenset()
        self.gcs_is_lost = False
        self._servers = {
            node["NodeID"]: Server(
                node["NodeManagerAddress"], node["NodeManagerPort"], node["NodeManagerHostname"]
            )
            for node in (ray.nodes() if nodes else ()) if node["NodeID"] in nodes
        }
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._gcs = Server(host.strip("[]"), int(port), "the Ray cluster's server (GCS)")
        # consecutive refusals of nodes that were reachable before
        self._refused: dict[str, int] = {}
        self._gcs_seen: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._observer, name="cluster-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def gcs_answers(self) -> bool:
        """Check the GCS now. Return False if it is gone or stopped, so that calls would hang. A GCS
        that never answered may be behind a firewall and counts as present."""
        if self.gcs_is_lost:
            return False
        return self._gcs_seen is None or answers(self._gcs)

    def _observer(self) -> None:
        while self.lost is None and not self._ended.is_set():
            self._look_at_nodes()
            self._look_at_gcs()
            self._ended.wait(BOTH_LOOKS_S if any(self._refused.values()) else INTERVAL_S)

    def _look_at_nodes(self) -> None:
        for node, server in self._servers.items():
            if not refuses(server):
                self._refused[node] = 0
            elif node in self._refused:  # a node that was never reachable may be behind a firewall
                self._refused[node] += 1
        gone = [node for node, count in self._refused.items() if count >= REFUSALS]
        if gone and not self._ended.is_set():
            self._lose(gone, "its Ray server (raylet) does not listen any more")

    def _lose(self, nodes: Collection[str], sign: str) -> None:
        self.lost_nodes = frozenset(nodes)
        names = ", ".join(
            f"{server.name} ({server.host}, Ray node {node[:12]})"
            for node, server in self._servers.items() if node in nodes
        )
        self.lost = f"node {names} is gone: {sign}; it was killed, or the machine was shut down"

    def look_at_nodes(self) -> None:
        """Check all reachable nodes after a loss that one of them may have caused; sets
        :attr:`lost`. Waits :data:`BOTH_LOOKS_S` for a node that is just going down."""
        for pause in (0.0, BOTH_LOOKS_S):
            if self.lost is not None:
                return
            time.sleep(pause)
            reached = {node: self._servers[node] for node in list(self._refused)}
            if gone := [node for node, server in reached.items() if refuses(server)]:
                self._lose(gone, "its Ray server (raylet) does not listen any more")

    def look_at_node(self, node: str, pauses: Sequence[float] = (0.0, BOTH_LOOKS_S)) -> None:
        """Check if the node of a process that has died is gone, too; sets :attr:`lost`. ``pauses``
        are the seconds before each check."""
        server = self._servers.get(node)
        for pause in pauses:
            if server is None or self.lost is not None:
                return
            time.sleep(pause)
            if refuses(server):
                self._lose([node], "its Ray server (raylet) does not listen any more")
            elif node in dead_nodes():
                self._lose([node], "the Ray cluster has lost it")

    def _look_at_gcs(self) -> None:
        if answers(self._gcs):
            self._gcs_seen = time.monotonic()
            return
        if self._gcs_seen is None:
            return
        silent = time.monotonic() - self._gcs_seen
        if silent >= GCS_TIMEOUT_S and not self._ended.is_set():
            self.gcs_is_lost = True
            # Ray's hook reports an uncaught exception to the GCS before it prints it, and would
            # wait until Ray ends this process without a message.
            if sys.excepthook is worker.custom_excepthook:
                sys.excepthook = worker.normal_excepthook
            self.lost = (
                f"{self._gcs.name} at {self._gcs.host}:{self._gcs.port} has not answered for "
                f"{silent:.0f} s: it has ended or is stopped. Its log is gcs_server.out in "
                "Ray's log folder on that machine"
            )


def dead_nodes() -> frozenset[str]:
    """Return Ray ids of the nodes that Ray has found dead."""
    return frozenset(node["NodeID"] for node in ray.nodes() if not node["Alive"])


def refuses(server: Server) -> bool:
    """Return True if the host refuses connections to the server. A host that does not answer may be
    busy."""
    try:
        socket.create_connection(server[:2], ANSWER_TIMEOUT_S).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def answers(server: Server) -> bool:
    """Return True if a GCS listens and answers. A stopped GCS still accepts connections."""
    try:
        socket.create_connection(server[:2], ANSWER_TIMEOUT_S).close()
        client = getattr(worker.global_worker, "gcs_client")  # noqa: B009  Ray does not declare it
        client.internal_kv_exists(b"raymm", None, timeout=ANSWER_TIMEOUT_S)
    except (OSError, RayError, RuntimeError, AttributeError):
        return False
    return True


# Seconds in which the main thread may end the run by itself after a signal or a lost GCS.
ORDERLY_END_S = 10.0
LOOK_S = 0.5


class StartObserver:
    """Context in which a thread ends this process if the run cannot start.

    Args:
        is_starting: True while no step is in flight; nothing is ended after that.
        end: ends this process; called with the number of the first signal (SIGTERM or SIGINT), or
            None, and with a sentence on the GCS, empty if a signal came before it counted as lost.
    """

    def __init__(
        self, is_starting: Callable[[], bool], end: Callable[[int | None, str], None]
    ) -> None:
        self._is_starting, self._end = is_starting, end
        self._observer = ClusterObserver(())
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._hears_signals = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="start-observer", daemon=True)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._hears_signals = old_descriptor == -1
            if not self._hears_signals:  # a notebook's event loop uses it
                signal.set_wakeup_fd(old_descriptor)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._hears_signals:
            signal.set_wakeup_fd(-1)
        os.write(self._writer, b"\0")
        self._thread.join()
        self._observer.stop()
        os.close(self._reader)
        os.close(self._writer)

    def _observe(self) -> None:
        number: int | None = None
        since: float | None = None  # time of the first signal or lost GCS before the first step
        while not self._ended.is_set():
            if select.select([self._reader], [], [], LOOK_S)[0]:
                numbers = [n for n in os.read(self._reader, 64)
                           if n in (signal.SIGTERM, signal.SIGINT)]
                number = next(iter(numbers), None) if number is None else number
            if not self._is_starting() or (number is None and self._observer.lost is None):
                since = None
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since < ORDERLY_END_S or self._observer.gcs_answers():
                continue
            if not self._ended.is_set() and self._is_starting():
                self._end(number, self._observer.lost or "")
