"""One checkpoint folder that is odd hides no other, and stops nothing."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from raymm.cli.main import main
from raymm.files.run_owner import OWNER, RunOwner
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.inspection import inspect_checkpoints
from raymm.storage.manifest import MANIFEST
from tests.storage.test_links import write_checkpoint


def circle(folder):
    folder.symlink_to(folder.name)


def pipe(folder):
    folder.mkdir()
    os.mkfifo(folder / MANIFEST)


def device(folder):
    folder.mkdir()
    (folder / MANIFEST).symlink_to("/dev/zero")


def huge(folder):
    folder.mkdir()
    (folder / MANIFEST).touch()
    os.truncate(folder / MANIFEST, 2**40)


def plain_file(folder):
    folder.write_text("no folder")


def pipe_of_a_shard(folder):
    write_checkpoint(folder)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)


ODD = [circle, pipe, device, huge, plain_file, pipe_of_a_shard]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_an_odd_checkpoint_is_one_line_and_the_others_are_used(tmp_path, make, capsys):
    root = tmp_path / "checkpoints"
    for step in (2, 6):
        write_checkpoint(root / f"step-{step:08d}")
    make(odd := root / "step-00000008")
    assert main(["check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["whole", "whole", "CORRUPT"], lines
    assert str(odd) in lines[-1]
    store = CheckpointStore(tmp_path)
    assert store.remove_leftovers() == []
    newest = store.newest()
    assert newest.folder == root / "step-00000006" and len(newest.corrupt) == 1
    assert os.path.lexists(odd)


@pytest.fixture
def as_nobody():
    """A folder, and a process that has no rights beyond those of files' modes."""
    folder = Path(tempfile.mkdtemp(prefix="raymm-", dir="/tmp"))
    before = os.geteuid()
    if before == 0:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    yield folder
    os.seteuid(before)
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_that_may_not_be_listed_is_reported(as_nobody):
    root = as_nobody / "checkpoints"
    for step in (2, 4, 6):
        write_checkpoint(root / f"step-{step:08d}")
    (root / "step-00000004").chmod(0)
    (root / "step-00000006").chmod(0)
    reports = list(inspect_checkpoints(as_nobody))
    assert [report.problem is None for report in reports] == [True, False, False]
    assert all("Permission denied" in str(report.problem) for report in reports[1:])
    store = CheckpointStore(as_nobody)
    assert store.remove_leftovers() == []
    assert store.newest().folder == root / "step-00000002"
    (root / "step-00000004").chmod(0o700)
    (root / "step-00000006").chmod(0o700)


@pytest.mark.timeout(60)
def test_an_owner_that_is_a_pipe_is_reported(tmp_path):
    os.mkfifo(tmp_path / OWNER)
    with pytest.raises(Exception, match="no regular file"), RunOwner(tmp_path):  # noqa: B017, PT011
        pass
