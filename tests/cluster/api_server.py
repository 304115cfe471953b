"""Small HTTPS server with the part of the Kubernetes API that Ray's autoscaler uses.

It has one RayCluster, which the autoscaler reads and patches, and the pods, which it reads.
"""

from __future__ import annotations

import copy
import json
import ssl
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from deploy.check.kustomize import json_patch

Say = Callable[..., None]


class ApiState:
    """Resources of the server: read and changed under :attr:`lock` only."""

    def __init__(self, cluster: dict[str, Any], say: Say) -> None:
        self.lock = threading.RLock()
        self.cluster, self.pods = copy.deepcopy(cluster), {}
        self.say = say
        self._version = 1
        self.changed()

    def changed(self) -> None:
        """Set a new resource version, as after every change."""
        self._version += 1
        self.cluster["metadata"]["resourceVersion"] = str(self._version)

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the resource of a path."""
        with self.lock:
            name = path.rpartition("/")[2]
            if path.endswith("/pods"):
                version = self.cluster["metadata"]["resourceVersion"]
                found: dict[str, Any] = {
                    "kind": "PodList", "metadata": {"resourceVersion": version},
                    "items": list(self.pods.values()),
                }
            elif "/pods/" in path and name in self.pods:
                found = self.pods[name]
            elif path.endswith(f"/rayclusters/{self.cluster['metadata']['name']}"):
                found = self.cluster
            else:
                return None
            return copy.deepcopy(found)

    def patch(self, payload: Any) -> dict[str, Any]:
        """Patch the RayCluster: a list of operations, or fields to merge."""
        with self.lock:
            self.say("autoscaler:", json.dumps(payload))
            merge = json_patch if isinstance(payload, list) else merge_patch
            self.cluster = merge(self.cluster, payload)
            self.changed()
            return copy.deepcopy(self.cluster)


def merge_patch(document: Any, patch: Any) -> Any:
    """Apply a merge patch to a document (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


@contextmanager
def served(state: ApiState, certificate: Path, key: Path):
    """Serve on a free port of the loopback interface, and yield the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(state: ApiState) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing; the rig reports events."""

        def _answer(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            found = state.get(urlparse(self.path).path)
            missing = {"kind": "Status", "status": "Failure", "code": 404}
            self._answer(404 if found is None else 200, missing if found is None else found)

        def do_PATCH(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(200, state.patch(payload))

    return Handler
