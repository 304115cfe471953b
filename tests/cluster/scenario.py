"""Shared parts of the rig's tests: the shipped cluster, and a small run that needs its GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.check import kustomize
from tests.cluster.rig import ROOT, Rig

# More than a run takes while a node is drained.
STEPS = 400
SHIPPED = ROOT / "deploy" / "overlays" / "interactive"
# Timeout of a whole job: its driver and two ranks import torch and transformers.
JOB_TIMEOUT_S = 400


def shipped_cluster(idle_seconds: int) -> dict[str, Any]:
    """Return the shipped RayCluster with a shorter idle timeout, which is minutes there."""
    (cluster,) = (
        one for one in kustomize.build(SHIPPED) if one["kind"] == "RayCluster"
    )
    cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = idle_seconds
    return cluster


def write_run(folder: Path) -> None:
    """Write ``config.yaml``: two ranks on one GPU each that compute on the CPU, and data workers.
    """
    from tests.support.tiny_run import prepare, settings, write_config

    inputs = folder / "inputs"
    inputs.mkdir()
    values = settings(prepare(inputs), folder / "run", STEPS)
    values["resources"] = {"cpus": 1, "gpus": 1}
    values["run"]["checkpoint_every"] = STEPS
    # A run that has to leave a node ends here; by default it would continue.
    values["run"]["max_preemptions"] = 0
    write_config(values, folder / "config.yaml")


def submit(rig: Rig, name: str, *settings: str) -> subprocess.Popen:
    """Submit the run with a new folder; the returned process ends with the job.

    Args:
        rig: rig with a dashboard.
        name: name of the folder.
        settings: changes of the file, as ``section.field=value``.
    """
    ray = str(Path(sys.executable).with_name("ray"))
    settings = (f"run.storage_path={rig.folder / name}", *settings)
    return subprocess.Popen(
        [ray, "job", "submit", "--address", rig.dashboard, "--",
         sys.executable, "-m", "raymm", "train", str(rig.folder / "config.yaml"),
         *(word for setting in settings for word in ("--set", setting))],
        env=rig.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def job(rig: Rig, name: str, *settings: str) -> str:
    """Submit the run like :func:`submit`, wait for its end, and return its output."""
    process = submit(rig, name, *settings)
    text, _ = process.communicate(timeout=JOB_TIMEOUT_S)
    assert process.returncode == 0, f"{text}\n{rig.account()}"
    return text


def losses(run: Path) -> list[float]:
    """Return the losses of all steps of a run, in order."""
    from raymm.monitor.metrics import read_metrics

    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    return [row["loss"] for row in read_metrics(file) if "loss" in row]
