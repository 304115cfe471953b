"""Small files in folders that other users can write to."""

import os
import socket

import pytest

from raymm.actors.storage.folder import LocalFolder
from raymm.actors.storage.plain_file import is_plain_name, read_plain


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
