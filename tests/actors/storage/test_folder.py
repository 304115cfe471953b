"""Folders and buckets behave the same."""

import os
import secrets
import socket

import pytest

from raymm.actors.storage import bucket as buckets
from raymm.actors.storage.folder import LocalFolder, is_plain_name, read_plain
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


@pytest.fixture
def odd(tmp_path):
    """Return paths that are not regular files, by name."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "linked pipe").symlink_to("pipe")
    (tmp_path / "terminal").symlink_to("/dev/tty")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    yield tmp_path
    server.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [
    "pipe", "folder", "circle", "nowhere", "zeros", "linked pipe", "terminal", "socket",
])
def test_only_regular_files_are_read(odd, name):
    for read in (read_plain, lambda path: LocalFolder(path.parent).read(path.name)):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            read(odd / name)
        assert caught.value.strerror


def test_files_are_read_up_to_a_size_and_through_links(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link", most=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_plain(tmp_path / "link", most=4)
    huge = tmp_path / "huge"
    huge.touch()
    os.truncate(huge, 2**40)
    with pytest.raises(OSError, match="more than 1,024 bytes"):
        read_plain(huge, most=1024)


@pytest.mark.parametrize(("name", "plain"), [
    ("model-00001-of-00002.safetensors", True), ("..a", True), (".a", True), ("a b", True),
    ("", False), (".", False), ("..", False), ("../a", False), ("/a", False), ("a/b", False),
    ("a/", False), ("./a", False), ("a\0", False), (None, False), (3, False),
])
def test_plain_names(name, plain):
    assert is_plain_name(name) is plain
