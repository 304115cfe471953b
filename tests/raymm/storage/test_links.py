"""Removing checkpoints changes no file that a save has not written, whatever links point to."""

from types import SimpleNamespace

import pytest
import torch

from raymm.actors.optimizer.checkpoint_shards import checksum, write_shard
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.inspection import prune_checkpoints
from raymm.storage.manifest import MANIFEST, FileEntry, Manifest, write_manifest
from raymm.storage.run_folder import RunFolder
from raymm.storage.step_folders import TORN

SHARD = "model-rank0.safetensors"


def write_checkpoint(folder, committed=True):
    """Write a checkpoint of one tensor; without a manifest, like a killed save."""
    folder.mkdir(parents=True)
    write_shard(folder / SHARD, {"llm/x": torch.ones(3)})
    file = checksum(folder / SHARD)
    if not committed:
        (folder / TORN).touch()
        return folder
    write_manifest(folder, Manifest(
        step=int(folder.name.removeprefix("step-")), index={"llm/x": SHARD}, plan={}, run={},
        files={SHARD: FileEntry(size=file.size, xxh3_128=file.checksum)}, trainer={},
    ))
    return folder


class Writer:
    """Running model with one rank and one tensor."""

    plan, kernels = SimpleNamespace(to_dict=dict), {}

    def __init__(self, step):
        self.steps_taken, self.group = step, self

    def reloadable(self):
        return frozenset()

    def not_finite_tensors(self):
        return []

    def call(self, method, folder, frozen):
        return [{SHARD: write_shard(f"{folder}/{SHARD}", {"llm/x": torch.ones(3)})}]


def save(run):
    CheckpointStore(run, keep=1).save(Writer(9), {})


def prune(run):
    prune_checkpoints(run, keep=1)


def resume(run):
    CheckpointStore(run).remove_leftovers()


def contents(folder):
    """Return every path below a folder, with the bytes of files and the targets of links."""
    return {
        path.relative_to(folder): (
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
    }


@pytest.fixture
def outside(tmp_path):
    """Return another user's files, including two checkpoints of another run."""
    folder = tmp_path / "outside"
    for step in (2, 4):
        write_checkpoint(folder / f"step-{step:08d}")
    write_checkpoint(folder / "torn" / "step-00000003", committed=False)
    for place in (folder, folder / "step-00000002", folder / "torn" / "step-00000003"):
        (place / "thesis.txt").write_text("years of work")
        (place / ".notes.raymm-partial").write_text("more of it")
    return folder


@pytest.fixture
def run(tmp_path):
    """Return a run with intact checkpoints of steps 4 and 6."""
    for step in (4, 6):
        write_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    return tmp_path / "run"


@pytest.mark.parametrize("operation", [save, prune, resume])
@pytest.mark.parametrize("target", ["step-00000002", "torn/step-00000003", "nowhere"])
def test_removing_a_linked_step_removes_only_the_link(run, outside, operation, target):
    link = run / "checkpoints" / "step-00000002"
    link.symlink_to(outside / target)
    before = contents(outside)
    operation(run)
    assert contents(outside) == before
    is_torn, is_whole = target.startswith("torn"), target == "step-00000002"
    assert link.is_symlink() != (is_torn if operation is resume else is_whole)


@pytest.mark.parametrize("operation", [save, prune])
def test_link_targets_and_other_files_in_a_step_are_kept(run, outside, operation):
    """Link the shard, the manifest and the mark, and also a folder and another file."""
    step = run / "checkpoints" / "step-00000004"
    for name in (SHARD, MANIFEST):
        (outside / name).write_bytes((step / name).read_bytes())
        (step / name).unlink()
        (step / name).symlink_to(outside / name)
    for name in (f".{TORN}.raymm-partial", ".x.raymm-partial"):
        (step / name).symlink_to(outside / "thesis.txt")
    (step / "folder").symlink_to(outside / "step-00000002")
    (step / "model-rank1.safetensors").mkdir()
    (step / "model-rank2.safetensors").write_text("nothing that the manifest names")
    (step / "mine.txt").write_text("mine")
    before = contents(outside)
    operation(run)
    assert contents(outside) == before and not step.exists()
    aside = contents(step.with_name(f"set-aside-{step.name}"))
    assert sorted(map(str, aside)) == [
        "folder", "mine.txt", "model-rank1.safetensors", "model-rank2.safetensors"
    ]


@pytest.mark.parametrize("operation", [save, prune, resume])
@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_a_linked_run_folder_keeps_its_neighbours(tmp_path, run, operation, place):
    """Link the run's folder, or all checkpoints, to another disk on purpose."""
    linked = tmp_path / place
    disk = linked.rename(tmp_path / "disk")
    linked.symlink_to(disk)
    root = disk / "checkpoints" if place == "run" else disk
    write_checkpoint(root / "step-00000008", committed=False)
    for folder in (root, root / "step-00000004", root / "step-00000008"):
        (folder / "mine.txt").write_text("mine")
    operation(run)
    assert linked.is_symlink() and (root / "mine.txt").is_file()
    kept = {path.parent.name for path in root.rglob("mine.txt")} - {root.name}
    old, torn = "step-00000004", "step-00000008"
    assert kept == {
        old if operation is resume else f"set-aside-{old}",
        f"set-aside-{torn}" if operation is resume else torn,
    }
    assert [folder.name for folder in CheckpointStore(run).committed()][-1:] == [
        "step-00000009" if operation is save else "step-00000006"
    ]


def test_a_mirrored_folder_follows_no_link(s3, outside, tmp_path, monkeypatch):
    """Check the local folder of a run in a bucket: emptied at the start, and uploaded."""
    monkeypatch.setattr("raymm.storage.run_folder.SETTLE_S", 0.5)
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))
    folder = RunFolder(s3.url("linked"))
    folder.check()
    folder.storage.replace("faults/rank0.txt", b"1")
    before = contents(outside)
    (folder.path / "faults").symlink_to(outside)
    with folder.owned(print):
        assert contents(outside) == before
        assert (folder.path / "faults" / "rank0.txt").read_bytes() == b"1"
        (folder.path / "a.txt").symlink_to(outside / "thesis.txt")
    assert folder.storage.files() == ["faults/rank0.txt"] and contents(outside) == before
