"""Files of caches are complete or absent."""

from pathlib import Path

import pytest

from raymm.data.readers.cache import cache_folder, written_file


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path))
    assert cache_folder("scans") == tmp_path / "scans"
    monkeypatch.setenv("RAYMM_CACHE", "")
    assert cache_folder("scans") == Path.home() / ".cache" / "raymm" / "scans"


def test_the_file_appears_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    with written_file(path) as file:
        file.write(b"\0text")
        assert not path.exists()
    assert path.read_bytes() == b"\0text" and list(path.parent.iterdir()) == [path]


def test_an_error_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / ("x" * 250)
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), written_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
