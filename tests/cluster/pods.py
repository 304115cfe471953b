"""Replacement for KubeRay's operator, with local processes as pods.

It creates the requested replicas, deletes those that the autoscaler names, and replaces ended ones.
A deleted pod runs its preStop command, then gets SIGTERM, and SIGKILL after its grace period.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.check.quantities import quantity
from tests.cluster.api_server import ApiState
from tests.support.processes import descendants

# Seconds from a pod's creation to its start; shorter than on real machines.
START_S = 1.0
INTERVAL_S = 0.25
# Line that `ray start` prints for a ready node, and timeout in seconds.
STARTED = "Ray runtime started"
START_TIMEOUT_S = 60.0
OBJECT_STORE = str(100 * 2**20)
RAY = str(Path(__file__).with_name("ray_command.py"))


class Pods:
    """Pods of one cluster.

    Args:
        state: state of the API server.
        environment: environment of every pod's process.
        gcs_port: GCS port of the head.
        head_options: additional options of ``ray start --head``.
        logs: folder of their output.

    Attributes:
        machines: maximum number of running workers; more are pending. None for no limit.
    """

    machines: int | None = None

    def __init__(
        self, state: ApiState, environment: Mapping[str, str], gcs_port: int,
        head_options: list[str], logs: Path,
    ) -> None:
        self._state, self._environment, self._logs = state, dict(environment), logs
        self._gcs_port, self._head_options = gcs_port, head_options
        self._processes: dict[str, subprocess.Popen] = {}
        self._leaving: list[threading.Thread] = []
        self._count = 0
        self._stop, self._starting = threading.Event(), threading.Lock()
        self._loop = threading.Thread(target=self._reconcile, daemon=True)

    def start(self) -> None:
        """Start the head, and manage the workers."""
        cluster = self._state.cluster
        group = cluster["spec"]["headGroupSpec"]
        with self._state.lock:
            name = f"{cluster['metadata']['name']}-head"
            self._add(name, "headgroup", "head")
            self._run(name, "headgroup", group, ["--head", *self._head_options])
        self._loop.start()

    def head_has_started(self) -> bool:
        """Return True if drivers can connect."""
        name = f"{self._state.cluster['metadata']['name']}-head"
        return self._has_started(name)

    def workers(self) -> list[str]:
        """Return the names of running worker pods."""
        with self._state.lock:
            return sorted(
                name for name, pod in self._state.pods.items()
                if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"
                and pod["status"]["phase"] == "Running"
            )

    def delete(self, name: str) -> None:
        """Delete a pod, as ``kubectl drain`` does, without waiting."""
        with self._state.lock:
            pod = self._state.pods.pop(name)
            self._state.changed()
            process = self._processes.pop(name, None)
        self._state.say("pod deleted:", name)
        if process is None:
            return
        group = self._group(pod["metadata"]["labels"]["ray.io/group"])
        thread = threading.Thread(target=self._terminate, args=(name, group, process))
        thread.start()
        self._leaving.append(thread)

    def kill(self, name: str) -> None:
        """Kill a pod's processes, including its raylet, as if the machine failed."""
        with self._state.lock:
            process = self._processes[name]
        for pid in (process.pid, *descendants(process.pid)):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop everything that was started."""
        self._stop.set()
        self._loop.join()
        processes = list(self._processes.values())
        for process in processes:
            _signal(process, signal.SIGTERM)
        for thread in self._leaving:
            thread.join(timeout=20)
        deadline = time.monotonic() + 10
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            _signal(process, signal.SIGKILL)
            process.wait()

    def _group(self, name: str) -> dict[str, Any]:
        groups = self._state.cluster["spec"]["workerGroupSpecs"]
        return next(group for group in groups if group["groupName"] == name)

    def _reconcile(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            for group in self._state.cluster["spec"]["workerGroupSpecs"]:
                self._reconcile_group(group)

    def _reconcile_group(self, group: dict[str, Any]) -> None:
        for name in (group.get("scaleStrategy") or {}).get("workersToDelete") or ():
            if name in self._state.pods:
                self.delete(name)
        with self._state.lock:
            mine = [
                name for name, pod in self._state.pods.items()
                if pod["metadata"]["labels"]["ray.io/group"] == group["groupName"]
            ]
            for name in list(mine):
                process = self._processes.get(name)
                if process is not None and process.poll() is not None:
                    self._state.say("pod ended:", name, process.returncode)
                    _signal(process, signal.SIGKILL)  # children that may remain
                    del self._processes[name], self._state.pods[name]
                    self._state.changed()
                    mine.remove(name)
            wanted = max(group.get("replicas") or 0, group.get("minReplicas") or 0)
            for _ in range(wanted - len(mine)):
                self._make(group)

    def _make(self, group: dict[str, Any]) -> None:
        self._count += 1
        name = f"{self._state.cluster['metadata']['name']}-{group['groupName']}-{self._count}"
        self._add(name, group["groupName"], "worker")
        self._state.say("pod pending:", name)

        def later() -> None:
            # One after the other: two concurrent starts on one machine take each other's ports.
            with self._starting:
                if self._stop.wait(START_S):
                    return
                while self._waits_for_machine(name):
                    if self._stop.wait(INTERVAL_S):
                        return
                with self._state.lock:
                    if name not in self._state.pods:
                        return
                    self._run(
                        name, group["groupName"], group,
                        [
                            "--address", f"127.0.0.1:{self._gcs_port}",
                            "--dashboard-agent-listen-port", "0",
                        ],
                    )
                    self._state.say("pod running:", name)
                self._wait_for_start(name)

        threading.Thread(target=later, daemon=True).start()

    def _waits_for_machine(self, name: str) -> bool:
        with self._state.lock:
            wanted = name in self._state.pods
            return wanted and self.machines is not None and len(self.workers()) >= self.machines

    def _wait_for_start(self, name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._has_started(name):
            if self._stop.wait(INTERVAL_S) or time.monotonic() > deadline:
                return

    def _has_started(self, name: str) -> bool:
        return STARTED in (self._logs / f"{name}.txt").read_text(errors="replace")

    def _add(self, name: str, group: str, kind: str) -> None:
        cluster = self._state.cluster["metadata"]["name"]
        labels = {"ray.io/cluster": cluster, "ray.io/node-type": kind, "ray.io/group": group}
        self._state.pods[name] = {
            "metadata": {
                "name": name, "namespace": "default", "labels": labels, "resourceVersion": "1",
            },
            "spec": {"containers": [{"name": "ray"}]},
            "status": {"phase": "Pending", "containerStatuses": []},
        }
        self._state.changed()

    def _run(self, name: str, group_name: str, group: dict[str, Any], options: list[str]) -> None:
        command = [sys.executable, RAY, "start", "--block", *options, *start_options(group)]
        with open(self._logs / f"{name}.txt", "w") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=self._pod_environment(name, group_name, group),
            )
        status = {"name": "ray", "ready": True, "state": {"running": {}}}
        self._state.pods[name]["status"] = {
            "phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [status],
        }
        self._state.changed()

    def _pod_environment(
        self, name: str, group_name: str, group: dict[str, Any]
    ) -> dict[str, str]:
        container = group["template"]["spec"]["containers"][0]
        own = {
            one["name"]: one["value"] for one in container.get("env") or ()
            if one["name"].startswith("RAY_")  # other variables are paths of the image
        }
        return {
            **self._environment, **own, "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_NODE_TYPE_NAME": group_name,
        }

    def _terminate(self, name: str, group: dict[str, Any], process: subprocess.Popen) -> None:
        spec = group["template"]["spec"]
        hook = (spec["containers"][0].get("lifecycle") or {}).get("preStop")
        deadline = time.monotonic() + spec.get("terminationGracePeriodSeconds", 30)
        if hook is not None and process.poll() is None:
            program, *arguments = hook["exec"]["command"]
            command = [sys.executable if program == "python" else program, *arguments]
            said = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=self._pod_environment(name, group["groupName"], group)
                | {"RAY_ADDRESS": f"127.0.0.1:{self._gcs_port}"},
            )
            try:
                while said.poll() is None and time.monotonic() < deadline:
                    if self._stop.wait(INTERVAL_S):
                        break
            finally:
                said.kill()
            self._state.say("preStop:", (said.communicate()[0] or "").strip())
        _signal(process, signal.SIGTERM)
        while process.poll() is None and time.monotonic() < deadline:
            if self._stop.wait(INTERVAL_S):
                break
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        _signal(process, signal.SIGKILL)
        process.wait()


def start_options(group: dict[str, Any]) -> list[str]:
    """Return KubeRay's options of a group for ``ray start``.

    They are its parameters, and the Ray container's limits.
    """
    parameters = dict(group.get("rayStartParams") or {})
    parameters.pop("dashboard-host", None)  # the rig's is on the loopback interface
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    parameters.setdefault("num-cpus", str(int(quantity(limits["cpu"]))))
    parameters.setdefault("memory", str(int(quantity(limits["memory"]))))
    if "nvidia.com/gpu" in limits:
        parameters.setdefault("num-gpus", str(limits["nvidia.com/gpu"]))
    return [
        *(part for name, value in parameters.items() for part in (f"--{name}", value)),
        "--object-store-memory", OBJECT_STORE, "--min-worker-port", "0",
        "--max-worker-port", "0",
    ]


def _signal(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
