"""``ray job submit --working-dir . -- python -m raymm train ...`` on a separate Ray head."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from raymm.training.stop_request import JOB_STOP_VARIABLE
from tests.support import REPOSITORY, SUPPORT
from tests.support.processes import end_group, wait_until
from tests.support.tiny_run import (
    change,
    child_environment,
    curve,
    settings,
    write_config,
)

PATIENCE_S = 240.0
# Steps of the job that is stopped: more than it reaches.
LONG = 100_000
# Timeout of the whole test: a cluster's head and two jobs, each with processes that import torch
# and Ray. Under a minute alone, many times that on a busy machine.
TEST_TIMEOUT_S = 900
RAY = str(Path(sys.executable).with_name("ray"))


def free_ports(count: int) -> list[int]:
    """Return free ports below Ray's worker ports (10002 to 19999)."""
    ports: list[int] = []
    for port in range(7100 + os.getpid() % 1000, 10000):
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
def ray_head(folder: Path, environment: dict[str, str]):
    """Start a head node in a process group; yield the address for jobs."""
    gcs, dashboard, agent, client = free_ports(4)
    # Ray's socket paths below it must stay under 107 characters.
    temp = Path("/tmp") / f"raymm-head-{os.getpid()}"
    command = [
        RAY, "start", "--head", "--block", "--num-cpus", "4", "--port", str(gcs),
        "--dashboard-port", str(dashboard), "--dashboard-agent-listen-port", str(agent),
        "--ray-client-server-port", str(client), "--temp-dir", str(temp), "--disable-usage-stats",
        "--object-store-memory", str(200 * 2**20), "--include-log-monitor", "false",
    ]
    with open(folder / "head.txt", "w") as log:
        head = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        wait_until(
            lambda: head.poll() is not None or is_listening(dashboard), PATIENCE_S, "the dashboard"
        )
        assert head.poll() is None, (folder / "head.txt").read_text()
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.terminate()  # also stops its children
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            pass
        end_group(head.pid)
        head.wait()
        shutil.rmtree(temp, ignore_errors=True)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Copy the repository's code, as a working directory."""
    folder = tmp_path / "checkout"
    for name in ("raymm", "actors", "scheduler", "kernels"):
        shutil.copytree(
            REPOSITORY / name, folder / name, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copytree(SUPPORT, folder / "tests" / "support")
    (folder / "job_callbacks.py").write_text(CALLBACKS)
    return folder


CALLBACKS = '''
from pathlib import Path
import raymm.actors.executor.executor, raymm.monitor.metrics, raymm.scheduler.plan.plan

def same_copy(inputs, output):
    """Fails in a rank that imported raymm from somewhere else than the working directory."""
    parts = raymm.actors.executor.executor, raymm.monitor.metrics, raymm.scheduler.plan.plan
    for module in parts:
        if not Path(module.__file__).is_relative_to(Path(__file__).parent):
            raise RuntimeError(f"{module.__file__} is not beside {__file__}")
    return output
'''


class Jobs:
    """Client of ``ray job`` on a cluster.

    Args:
        folder: working directory of the jobs.
        environment: environment of the command.
    """

    def __init__(self, address: str, folder: Path, environment: dict[str, str]) -> None:
        self._here = ["--address", address]
        self._folder, self._environment = folder, environment

    def __call__(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            [RAY, "job", command, *self._here, *arguments], cwd=self._folder,
            env=self._environment, text=True, timeout=PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def train(self, name: str, *options: str, **changes: object) -> str:
        """Submit ``raymm train``.

        Args:
            name: name of the job.
            options: options of ``ray job submit``.
            changes: changes of the configuration, with ``__`` instead of dots.
        """
        sets = (
            part for key, value in changes.items()
            for part in ("--set", f"{key.replace('__', '.')}={value}")
        )
        return self(
            "submit", "--submission-id", name, "--working-dir", ".", *options, "--",
            sys.executable, "-m", "raymm", "train", "config.yaml", *sets,
        )


def begin_long_job(jobs: Jobs, folder: Path, run: Path) -> None:
    """Start a job that may save when it is stopped."""
    variables = {"env_vars": {JOB_STOP_VARIABLE: "120"}}
    (folder / "runtime.yaml").write_text(json.dumps(variables))
    jobs.train(
        "long", "--no-wait", "--runtime-env", "runtime.yaml", run__storage_path=run,
        run__steps=LONG, run__checkpoint_every=LONG, optimizer__total_steps=LONG,
    )
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: metrics.is_file() and len(read_metrics(metrics)) > 1, PATIENCE_S, "steps of the job"
    )


def stop_long_job(jobs: Jobs, run: Path) -> None:
    """Stop the job and check that no finished step is lost."""
    jobs("stop", "long")
    text = jobs("logs", "long")
    latest = CheckpointStore(run).latest()
    assert latest is not None, text
    step = read_manifest(latest).step
    assert f"stopped by SIGTERM after step {step} of {LONG}: saved in {latest}" in text
    assert f"`ray job stop` kills after 120 s ({JOB_STOP_VARIABLE})" in text
    assert curve(run)[-1][0] == step


@pytest.mark.system
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_concurrent_jobs_equal_a_local_run_and_can_be_stopped(
    finished, inputs, checkout, tmp_path
):
    """Use token authentication; all nodes run the code of the working directory."""
    values = settings(inputs, tmp_path / "run", 12)
    change(values, "run.checkpoint_every", 6)
    change(values, "run.log_every", 5)
    change(values, "model.encoders.vision.postprocess_module", "job_callbacks:same_copy")
    write_config(values, checkout / "config.yaml")
    (tmp_path / "token").write_text(secrets.token_hex(32))
    environment = child_environment(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"),
    )
    del environment["RAY_ADDRESS"], environment["PYTHONPATH"]
    with ray_head(tmp_path, environment) as address:
        jobs = Jobs(address, checkout, environment)
        begin_long_job(jobs, checkout, tmp_path / "long")
        jobs.train("short")
        long_steps = len(curve(tmp_path / "long"))
        text = jobs("logs", "short")
        stop_long_job(jobs, tmp_path / "long")
    assert 1 < long_steps < len(curve(tmp_path / "long")) < LONG
    assert curve(tmp_path / "run") == curve(finished.path)
    # Output to a file has no redrawn progress bar and no colours. (Ray's own lines have both tabs
    # and colours.)
    own = re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+\t.*$", "", text, flags=re.M)
    assert [char for char in own if not char.isprintable() and char != "\n"] == []
    # A slow machine also prints steps that come after a silence.
    printed = re.findall(r"^step +(\d+)/12  loss", text, re.M)
    assert [step for step in printed if step in ("5", "10", "12")] == ["5", "10", "12"]
    assert "note: `ray job stop` kills a job after 3 s" in text
