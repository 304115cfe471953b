"""Remote paths have the parts of ``pathlib`` and the patterns of ``glob``."""

import glob
from pathlib import Path, PurePosixPath

import pytest

from raymm.data.remote.path import (
    RemotePath,
    _expression,
    located,
    read_range,
    size_of,
    version_of,
)
from raymm.data.remote.urls import DataUrl

FILES = (
    "a.txt", "ab.txt", "b.md", "x/a.txt", "x/y/a.txt", "x/y/[1].txt", "x/1.txt", "x/-.txt",
    "x/^.txt", "x/!.txt",
)


def remote(key):
    return RemotePath(DataUrl("s3", "bucket", key))


@pytest.mark.parametrize("key", ["a/b.tar.gz", "a/b", "b.txt", "a/.hidden", "\u00fc/\u00e4.json"])
def test_parts_are_those_of_pathlib(key):
    path, other = remote(key), PurePosixPath(key)
    assert (path.name, path.stem, path.suffix) == (other.name, other.stem, other.suffix)
    assert (path.parent / "c").url.key == str(other.parent / "c")


@pytest.mark.parametrize("pattern", [
    "*.txt", "?.txt", "*/*.txt", "**/*.txt", "x/**", "x/**/a.txt", "[ab].txt", "[!a].md",
    "x/[0-9].*", "x/[[]*", "x/y/[[]1].txt", "x/[!-]*", "**/y/*",
])
def test_patterns_match_what_glob_finds(tmp_path, pattern):
    for name in FILES:
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    due = sorted(name for name in found if (tmp_path / name).is_file())
    expression = _expression(pattern.split("/"))
    assert sorted(name for name in FILES if expression.fullmatch(name)) == due


def test_local_files_are_read_by_ranges(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"0123456789")
    assert read_range(file, 3, 4) == b"3456" and read_range(file, 8, 9) == b"89"
    assert size_of(file) == 10
    before = version_of(file)
    file.write_bytes(b"0123456780")
    assert version_of(file) >= before


def test_paths_are_resolved_and_urls_parsed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert located(tmp_path / "link") == tmp_path.resolve() / "real"
    assert located("s3://bucket/a/../b") == remote("b")
    assert located(remote("b")) == remote("b") and isinstance(located("a"), Path)
