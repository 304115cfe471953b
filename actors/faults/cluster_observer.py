"""Whether the cluster under a run is still there.

Ray tells late, or not at all: that a node's server (the raylet) is gone after some 15 s, in which
its processes go on; that the server which knows the cluster (the GCS) is gone not before a minute,
when it ends the process. A run needs neither for its steps, so it would not notice, and fail at its
end. Both listen at TCP ports: where a host refuses the connection, the server is gone.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import ray
from ray.exceptions import RayError

# Seconds between two looks.
INTERVAL_S = 1.0
# Seconds between the two looks at a node that refuses, or whose process has died: one that is
# killed as a whole loses it first, or last.
BOTH_LOOKS_S = 0.2
# Seconds that a connection, or the GCS's answer, may take.
ANSWER_TIMEOUT_S = 5.0
# Looks in a row at which a server refuses, until it counts as gone: one may be starting anew.
REFUSALS = 2
# Seconds without the GCS after which a run ends. Where it is gone from its port, too: clusters
# can be set up to start it anew. After 60 s Ray would end this process without a word.
GCS_TIMEOUT_S = 20.0


class Server(NamedTuple):
    """Where a server listens, and what it is called."""

    host: str
    port: int
    name: str


class ClusterObserver:
    """Looks at the servers that some processes need, in a thread that does not keep this process
    from ending.

    Args:
        nodes: Ray's ids of the nodes; without any, the GCS alone is observed.

    Attributes:
        nodes: as given.
        lost: what is gone, in a sentence; None as long as nothing is.
        lost_nodes: ids of nodes that are.
        gcs_is_lost: whether calls that change the cluster would never return.
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
        self._refused: dict[str, int] = {}  # looks in a row, of nodes that have been reached
        self._gcs_seen: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._observer, name="cluster-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def gcs_answers(self) -> bool:
        """Look at the GCS now. Return False if it is gone or stopped, so that calls which change
        the cluster would not return; a GCS that never answered may be behind a firewall."""
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
            elif node in self._refused:  # a firewall may refuse from the beginning
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
        """Look at all nodes that have been reached: something has gone, and one of them may be why;
        :attr:`lost` says so. Waits :data:`BOTH_LOOKS_S` for one that is just going."""
        for pause in (0.0, BOTH_LOOKS_S):
            if self.lost is not None:
                return
            time.sleep(pause)
            reached = {node: self._servers[node] for node in list(self._refused)}
            if gone := [node for node, server in reached.items() if refuses(server)]:
                self._lose(gone, "its Ray server (raylet) does not listen any more")

    def look_at_node(self, node: str, pauses: Sequence[float] = (0.0, BOTH_LOOKS_S)) -> None:
        """Look whether the node of a process that has died is gone, too; :attr:`lost` says so.

        Args:
            node: its id.
            pauses: before each look, in seconds.
        """
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
            self.lost = (
                f"{self._gcs.name} at {self._gcs.host}:{self._gcs.port} has not answered for "
                f"{silent:.0f} s: it has ended or is stopped. Its log is gcs_server.out in "
                "Ray's log folder on that machine"
            )


def dead_nodes() -> frozenset[str]:
    """Ray's ids of the nodes that it has found dead."""
    return frozenset(node["NodeID"] for node in ray.nodes() if not node["Alive"])


def refuses(server: Server) -> bool:
    """Whether the host says that nobody listens there. A host that says nothing may be busy."""
    try:
        socket.create_connection(server[:2], ANSWER_TIMEOUT_S).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def answers(server: Server) -> bool:
    """Whether a GCS listens and answers: one that is stopped still accepts connections."""
    try:
        socket.create_connection(server[:2], ANSWER_TIMEOUT_S).close()
        from ray._private.worker import global_worker

        client = getattr(global_worker, "gcs_client")  # noqa: B009  Ray sets it without saying so
        client.internal_kv_exists(b"raymm", None, timeout=ANSWER_TIMEOUT_S)
    except (OSError, RayError, RuntimeError, AttributeError):
        return False
    return True
