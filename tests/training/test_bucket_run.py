"""Runs in a bucket of a real S3 server, or in a custom file system, equal a run in a folder."""

import os
import shutil
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.storage.location import storage_folder
from raymm.storage import run_folder
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from raymm.storage.run_folder import RunFolder
from tests.support.processes import all_gone, end_group, wait_until
from tests.support.s3_server import S3Server
from tests.support.tiny_run import STEPS, checkpoint_tensors, curve, start

PATIENCE_S = 240.0


class HeldUpload:
    """Upload that does not finish: the server blocks in the middle of it."""

    def __init__(self, server: S3Server, part: str) -> None:
        self.reached, self._goes_on = threading.Event(), threading.Event()
        self._part, self._server = part, server
        server.before = self._hold

    def _hold(self, method: str, key: str) -> None:
        if method == "PUT" and self._part in key:
            self.reached.set()
            self._goes_on.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._goes_on.set()
        self._server.before = lambda method, key: None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Set the local folder for runs in buckets."""
    monkeypatch.setattr(run_folder, "SETTLE_S", 0.2)
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))


def steps(url):
    return [read_manifest(folder).step for folder in CheckpointStore(url).committed()]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_killed_upload_resumes_from_the_last_intact_checkpoint(
    s3, cache, finished, make_config, raymm, joins, tmp_path
):
    """Check bitwise equality with the run in a folder, including pruning and export."""
    import ray._private.state

    before = ray._private.state.actors()
    url = s3.url("killed/run")
    config = make_config({"run.storage_path": url})
    upload = HeldUpload(s3, "checkpoints/step-00000006/model-rank0.safetensors")
    driver = start(["train", config], tmp_path, tmp_path / "killed.txt", **joins)
    try:
        wait_until(
            lambda: upload.reached.is_set() or driver.poll() is not None, PATIENCE_S, "the upload"
        )
        assert driver.poll() is None, (tmp_path / "killed.txt").read_text()
        ranks = [
            actor["Pid"] for name, actor in ray._private.state.actors().items()
            if name not in before and actor["State"] == "ALIVE"
        ]
        assert len(ranks) >= 2
        for pid in (driver.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        driver.wait(PATIENCE_S)
        wait_until(lambda: all_gone(set(ranks)), PATIENCE_S, "the end of the ranks")
    finally:
        end_group(driver.pid)
        upload.let_go()
    assert steps(url) == [2, 4]
    torn = storage_folder(url) / "checkpoints/step-00000006"
    assert "manifest.json" not in torn.names() and "model-rank0.safetensors" not in torn.names()

    code, text = raymm("train", config)
    assert code == 0, text
    folder = RunFolder(url)
    assert f"removed {torn}, which was never committed" in text
    assert f"resuming from {storage_folder(url) / 'checkpoints/step-00000004'}" in text
    assert f"run folder {url} (here in {folder.path})" in text
    assert curve(folder.path) == curve(finished.path)
    # The bucket and the local folder have the same files.
    kept = [name for name in storage_folder(url).files() if not name.startswith("checkpoints/")]
    assert {"metrics.jsonl", "loss.png", "plan.json", "trace.json"} <= set(kept)
    for name in kept:
        assert storage_folder(url).read(name) == (folder.path / name).read_bytes()
    assert steps(url) == [10, 12]

    latest = CheckpointStore(url).newest()
    stored = StoredTensors(latest.folder, latest.manifest.index, latest.manifest.shards)
    expected = checkpoint_tensors(finished.path)
    tensors = stored.read(dict.fromkeys(expected))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    code, text = raymm("export", config, "--out", str(tmp_path / "out"))
    assert code == 0, text
    projector = load_file(tmp_path / "out" / "vision_projector" / "model.safetensors")
    assert projector
    for name, tensor in projector.items():
        assert torch.equal(tensor, expected[f"vision/projector.{name}"])


@pytest.mark.cells(1)
@pytest.mark.parametrize("system", ["vault", "arrow"])
def test_a_run_in_a_custom_file_system_resumes(
    cache, finished, make_config, raymm, tmp_path, system
):
    """Check bitwise equality with the run in a folder that was not stopped."""
    url = f"tests.support.custom_vault:{system}:/{tmp_path}/stored"
    changes = {"run.storage_path": url, "optimizer.total_steps": STEPS}
    assert raymm("train", make_config({**changes, "run.steps": 5}))[0] == 0
    assert (tmp_path / "stored" / "checkpoints" / "step-00000005" / "manifest.json").is_file()
    shutil.rmtree(tmp_path / "cache")  # only the files in the file system remain
    code, text = raymm("train", make_config({**changes, "run.steps": STEPS}))
    assert code == 0 and "step-00000005" in text, text
    assert curve(RunFolder(url).path) == curve(finished.path)
    assert curve(tmp_path / "stored") == curve(finished.path)
    tensors, expected = checkpoint_tensors(tmp_path / "stored"), checkpoint_tensors(finished.path)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
