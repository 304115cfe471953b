"""Folders and buckets behave the same."""

import secrets

import pytest

from raymm.actors.storage import bucket as buckets
from raymm.actors.storage.location import storage_folder


@pytest.fixture(params=["folder", "bucket", "vault", "arrow"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "folder":
        return storage_folder(tmp_path / "run")
    if request.param in ("vault", "arrow"):
        monkeypatch.setenv("VAULT", str(tmp_path))
        buckets.connect.cache_clear()
        return storage_folder(f"tests.support.custom_file_systems:{request.param}://runs/a")
    server = request.getfixturevalue("s3")
    return storage_folder(server.url(secrets.token_hex(4)))


def test_a_folder_and_a_bucket_behave_the_same(folder):
    assert folder.names() == [] and folder.files() == []
    with pytest.raises(FileNotFoundError):
        folder.read("none")
    folder.unlink("none")
    step = folder / "checkpoints" / "step"
    step.create()
    for data in (b"1", b"", b"22"):
        step.replace("a", data)
        assert step.read("a") == data
    large = secrets.token_bytes(12 * 2**20)  # in two parts
    with step.writing("b") as path:
        path.write_bytes(large)
    with step.reading("b") as path:
        assert path.read_bytes() == large
    (step / "deeper").create()
    (step / "deeper").replace("c", b"3")
    folder.replace("log", b"4")
    assert step.names() == ["a", "b", "deeper"] and step.name == "step"
    assert folder.files() == [
        "checkpoints/step/a", "checkpoints/step/b", "checkpoints/step/deeper/c", "log",
    ]
    again = storage_folder(folder.place) / "checkpoints/step"
    assert again == step and again.read("deeper/c") == b"3"
    step.unlink("a")
    step.rename("other")
    assert folder.files() == ["checkpoints/other/b", "checkpoints/other/deeper/c", "log"]
    other = folder / "checkpoints" / "other"
    with other.reading("b") as path:
        assert path.read_bytes() == large
    with pytest.raises(OSError, match="not empty"):
        other.remove()
    assert other.parent.parent == folder and not other.is_link
    other.unlink("b")
    (other / "deeper").unlink("c")
    (other / "deeper").remove()
    other.remove()
    assert folder.files() == ["log"] and "other" not in (folder / "checkpoints").names()
