"""An invalid checkpoint folder hides no other, and stops nothing."""

import errno
import os

import pytest

from raymm.cli.main import main
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.inspection import inspect_checkpoints
from raymm.storage.manifest import MANIFEST
from raymm.storage.run_folder import OWNER, RunOwner
from tests.raymm.storage.test_links import write_checkpoint


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
def test_an_invalid_checkpoint_is_reported_and_others_are_used(tmp_path, make, capsys):
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


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_unreadable_folder_is_reported(tmp_path, monkeypatch, number):
    """Simulate the system's error, as root may list every folder."""
    root = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        write_checkpoint(root / f"step-{step:08d}")
    hidden = {str(root / "step-00000004"), str(root / "step-00000006")}

    def refusing(function):
        def refuse(path, *arguments, **options):
            if hidden & {os.fspath(path), os.path.dirname(os.fspath(path))}:
                raise OSError(number, os.strerror(number), path)
            return function(path, *arguments, **options)

        return refuse

    for name in ("listdir", "open", "stat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    reports = list(inspect_checkpoints(tmp_path))
    assert [report.problem is None for report in reports] == [True, False, False]
    assert all(os.strerror(number) in str(report.problem) for report in reports[1:])
    store = CheckpointStore(tmp_path)
    assert store.remove_leftovers() == []
    assert store.newest().folder == root / "step-00000002"


@pytest.mark.timeout(60)
def test_an_owner_file_that_is_a_pipe_is_reported(tmp_path):
    os.mkfifo(tmp_path / OWNER)
    with pytest.raises(Exception, match="not a regular file"), RunOwner(tmp_path):  # noqa: B017, PT011
        pass
