"""Files that the driver and a process must both see."""

import secrets
from pathlib import Path

import pytest

from raymm.actors.faults import observed_actor
from raymm.actors.faults.observed_actor import problem_seeing
from raymm.actors.storage.location import storage_folder


@pytest.fixture(params=["folder", "bucket"])
def folder(request, tmp_path):
    if request.param == "folder":
        return storage_folder(tmp_path / "run")
    return storage_folder(request.getfixturevalue("s3").url(secrets.token_hex(4)))


def test_another_folder_of_the_same_name_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(observed_actor, "SEEN_WITHIN_S", 0.0)
    folder.create()
    folder.replace("token", b"mine")
    assert problem_seeing(folder.location, "token", "mine") is None
    assert folder.names() == ["token"]
    assert "a different file" in (problem_seeing(folder.location, "token", "other") or "")
    for elsewhere in ((folder / "elsewhere").location, "/dev/null/run"):
        problem = problem_seeing(elsewhere, "token", "mine")
        assert problem is not None
        assert "does not find the file that the driver wrote there" in problem
    assert folder.names() == ["token"]


def test_a_folder_that_cannot_be_written_is_noticed():
    version = Path("/proc/version").read_text()
    assert "cannot use it: " in (problem_seeing("/proc", "version", version) or "")
