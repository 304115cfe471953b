"""KubeRay cluster on one machine.

Ray's own KubeRay autoscaler (v2, from the wheel) uses a small server with the Kubernetes API, and
pods are ``ray start`` processes. Everything has separate ports and folders, and only processes
started here are stopped.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.runtime.embedded.forked_workers import server_variables
from tests.cluster.api_server import ApiState, Say, served
from tests.cluster.pods import Pods

ROOT = Path(__file__).resolve().parents[2]
# Timeout of every wait: a busy machine takes many times as long as a quiet one.
PATIENCE_S = 180.0
_AUTOSCALER = (
    "from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler as run; "
    "run({name!r}, 'default', gcs_address='127.0.0.1:{port}')"
)


@dataclass(frozen=True)
class Rig:
    """Running cluster.

    Attributes:
        dashboard: address for ``ray job submit``, if there is one.
        gcs: address for ``ray.init``.
        environment: environment of client processes: token and import path.
        folder: folder of logs, and for files of tests.
        events: one line per event.
    """

    pods: Pods
    dashboard: str
    gcs: str
    environment: dict[str, str]
    folder: Path
    events: list[str]

    def wait_until(self, done: Callable[[], Any], what: str) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: the condition stays false.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s\n{self.account()}")
            time.sleep(0.2)

    def account(self) -> str:
        """Return the events, and the end of every log."""
        logs = [
            f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
            for file in sorted(self.folder.glob("*.txt"))
        ]
        return "\n".join([*self.events, *logs])


def free_ports(count: int) -> list[int]:
    """Return free ports below Ray's worker ports (10002 to 19999)."""
    ports: list[int] = []
    for port in range(5200 + os.getpid() * 7 % 1500, 10000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")


@contextmanager
def kuberay(cluster: dict[str, Any], say: Say = print, jobs: bool = False) -> Iterator[Rig]:
    """Start a RayCluster for a `with` block; all of its processes are stopped at the end.

    Args:
        cluster: manifest.
        say: called with every event, too.
        jobs: True to start a dashboard for submitted jobs, which takes seconds.
    """
    start, events = time.monotonic(), []

    def note(*words: Any) -> None:
        events.append(f"[{time.monotonic() - start:6.1f}] {' '.join(map(str, words))}")
        say(events[-1])

    cluster = _with_defaults(cluster)
    # Ray's socket paths below it must stay under 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rig-", dir="/tmp"))
    certificate, key = _certificate(folder)
    gcs, dashboard, agent, client = free_ports(4)
    environment = _environment(cluster)
    state = ApiState(cluster, note)
    name = cluster["metadata"]["name"]
    head = [
        "--port", str(gcs), "--dashboard-port", str(dashboard), "--no-monitor",
        "--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client),
        "--temp-dir", str(folder / "ray"), "--include-dashboard", str(jobs).lower(),
    ]
    pods = autoscaler = None
    try:
        with served(state, certificate, key) as port:
            # For the head's pod: its service account may read the RayCluster.
            environment |= {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1", "RAY_CLUSTER_NAME": name,
                "KUBERNETES_SERVICE_PORT_HTTPS": str(port), "RAY_HEAD_POD_NAME": f"{name}-head",
                "RAY_KUBERAY_CA_CERT_PATH": str(certificate),
                "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
                "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
            }
            pods = Pods(state, environment, gcs, head, folder)
            pods.start()
            autoscaler = _start_autoscaler(name, environment, gcs, folder)
            rig = Rig(
                pods, f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", environment, folder,
                events,
            )
            rig.wait_until(pods.head_has_started, "the head")
            rig.wait_until(lambda: not jobs or _listens(dashboard), "the dashboard")
            note("the head is up")
            yield rig
    finally:
        if autoscaler is not None:
            _end(autoscaler)
        if pods is not None:
            pods.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _with_defaults(cluster: dict[str, Any]) -> dict[str, Any]:
    metadata = {"namespace": "default", **cluster["metadata"]}
    groups = [
        {"scaleStrategy": {}, "replicas": group.get("minReplicas", 0), **group}
        for group in cluster["spec"]["workerGroupSpecs"]
    ]
    spec = {**cluster["spec"], "workerGroupSpecs": groups}
    return {**cluster, "metadata": metadata, "spec": spec}


def _environment(cluster: dict[str, Any]) -> dict[str, str]:
    """Return the environment of all processes: the operator's, and settings for a shared machine.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {
        **server_variables(),
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # Otherwise Ray kills workers when other processes use up the machine's memory.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node of 7 CPUs would start 7 workers at once, which import for a minute.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "120",
        # Detect a killed node after some 3 s instead of 15.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    if (cluster["spec"].get("authOptions") or {}).get("mode") == "token":
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "api.crt", folder / "api.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def _start_autoscaler(
    name: str, environment: dict[str, str], gcs: int, folder: Path
) -> subprocess.Popen:
    with open(folder / "autoscaler.txt", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _AUTOSCALER.format(name=name, port=gcs)], env=environment,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
