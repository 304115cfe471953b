"""Embedded Ray that fails to start, or starts late."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raymm.runtime.embedded.cluster_guardian import session_processes

DRIVER = """
import subprocess
from raymm import ClusterError
from raymm.runtime.cluster import connect
from raymm.runtime.embedded.cluster_guardian import session_processes
import os
try:
    connect()
except ClusterError as error:
    print("said:", error)
print("left:", session_processes(os.getpid()))
"""


@pytest.mark.ray
@pytest.mark.system
def test_a_failed_start_is_reported_and_cleaned_up(tmp_path):
    """Give Ray's server no time to open its port."""
    environment = {
        **os.environ, "RAY_gcs_server_port_wait_time_s": "0", "RAY_TMPDIR": str(tmp_path)
    }
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )
    said = done.stdout
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "an embedded Ray did not start on this machine" in said
    assert f"Its logs are in {tmp_path}" in said and "RAY_ADDRESS" in said
    assert "left: set()" in said


AGAIN = """
import ray
from raymm.runtime.cluster import connect
init, calls = ray.init, []
def fails_once(**options):
    calls.append(options)
    if len(calls) == 1:
        raise RuntimeError("too slow")
    return init(**options)
ray.init = fails_once
print(connect(), len(calls), ray.cluster_resources()["CPU"] > 0)
"""


@pytest.mark.ray
@pytest.mark.system
def test_a_slow_start_is_retried():
    # folder of sockets, whose paths must be short
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", AGAIN], env=environment, capture_output=True, text=True,
            timeout=200,
        )
    assert done.stdout.splitlines()[-1:] == ["True 2 True"], done.stderr


TWICE = """
import ray
from raymm.runtime.cluster import connected
for _ in range(2):
    with connected():
        @ray.remote(num_cpus=0)
        def parent() -> str:
            import os
            from pathlib import Path
            return Path(f"/proc/{os.getppid()}/cmdline").read_text()
        print("--serve" in ray.get(parent.remote(), timeout=100))
"""


@pytest.mark.ray
@pytest.mark.system
def test_a_second_ray_in_a_process_has_workers_too():
    """Start it like a notebook's second run: it must not use the first one's server."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True,
            timeout=250,
        )
    assert done.stdout.splitlines() == ["True", "True"], done.stderr


def test_no_process_reads_unused_logs(ray_cluster):
    commands = [
        Path(f"/proc/{process}/cmdline").read_text() for process in session_processes(os.getpid())
    ]
    assert any("gcs_server" in command for command in commands), "it is called otherwise"
    assert not any("log_monitor" in command for command in commands)
