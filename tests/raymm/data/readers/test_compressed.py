"""Compressed files equal what Python's own modules decompress."""

import gzip
from pathlib import Path

import pytest

from raymm.data.readers.compressed import data_suffix, plain_file
from raymm.errors import DataError

TEXT = b'{"text": "a"}\n' * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("name", "suffix"), [
    ("a.jsonl", ".jsonl"), ("a.jsonl.gz", ".jsonl"), ("a.b.json.zst", ".json"), ("a.gz", ""),
    (".gz", ""), ("a", ""),
])
def test_the_suffix_is_that_below_the_compression(name, suffix):
    assert data_suffix(Path(name)) == suffix


def test_a_plain_file_is_read_in_place(tmp_path):
    for content in (b"", TEXT):
        (file := tmp_path / "rows.jsonl.gz").write_bytes(content)  # the bytes decide, not the name
        assert plain_file(file) == file


def test_gzip_of_several_members_is_joined(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(TEXT) + gzip.compress(b"end"))
    fractions = []
    copy = plain_file(file, fractions.append)
    assert copy.read_bytes() == TEXT + b"end" and copy.suffix == ".jsonl" and fractions
    assert plain_file(file) == copy


def test_a_rewritten_file_is_decompressed_again(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(TEXT))
    plain_file(file)
    file.write_bytes(gzip.compress(b"other"))
    assert plain_file(file).read_bytes() == b"other"


@pytest.mark.parametrize("damage", [
    lambda data: data[:-9], lambda data: data[:20] + b"\xff" * 20 + data[40:],
    lambda data: data + b"garbage", lambda data: data[:3],
])
def test_damaged_files_are_named(tmp_path, damage):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(damage(gzip.compress(TEXT)))
    with pytest.raises(DataError, match=f"{file} is not a complete compressed file"):
        plain_file(file)
    assert not list((tmp_path / "cache").rglob("*.part"))
