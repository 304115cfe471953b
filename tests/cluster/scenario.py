"""What the rig's tests share: the shipped cluster, and a small run that asks for its GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.check import kustomize
from tests.cluster.rig import ROOT, TEST_FOLDERS, Rig

# More than a run takes while a node is announced to end.
STEPS = 400
SHIPPED = ROOT / "deploy" / "overlays" / "interactive"
# Of a whole job: its driver and two ranks import torch and transformers anew.
JOB_TIMEOUT_S = 400


def shipped_cluster(idle_seconds: int) -> dict[str, Any]:
    """The RayCluster as it is shipped, but for how long an idle node stays: minutes there."""
    (cluster,) = (
        one for one in kustomize.build(SHIPPED) if one["kind"] == "RayCluster"
    )
    cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = idle_seconds
    return cluster


def write_run(folder: Path) -> None:
    """``config.yaml``: two ranks on a GPU each, which compute on the CPU, and data workers."""
    sys.path[:0] = TEST_FOLDERS
    from tiny_run import prepare, settings, write_config

    inputs = folder / "inputs"
    inputs.mkdir()
    values = settings(prepare(inputs), folder / "run", STEPS)
    values["resources"] = {"cpus": 1, "gpus": 1}
    values["run"]["checkpoint_every"] = STEPS
    # A run that has to leave a node shows how it ends; by itself it would go on.
    values["run"]["max_preemptions"] = 0
    write_config(values, folder / "config.yaml")


def submit(rig: Rig, name: str, *settings: str) -> subprocess.Popen:
    """Submit the run with a folder of its own; the process ends with the job.

    Args:
        rig: with a dashboard.
        name: of the folder.
        settings: that replace those of the file, as ``section.field=value``.
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
    """As :func:`submit`, and wait for its end; its output."""
    process = submit(rig, name, *settings)
    text, _ = process.communicate(timeout=JOB_TIMEOUT_S)
    assert process.returncode == 0, f"{text}\n{rig.account()}"
    return text


def losses(run: Path) -> list[float]:
    """Of every step that a run has taken, in order."""
    from raymm.monitor.metrics import read_metrics

    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    return [row["loss"] for row in read_metrics(file) if "loss" in row]
