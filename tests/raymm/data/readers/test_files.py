"""Data files of a path, folder or pattern."""

import gzip
from pathlib import Path

import pytest

from raymm.data.readers.files import (
    cache_folder,
    data_suffix,
    find_files,
    is_there,
    plain_file,
    visible_files,
    written_file,
)
from raymm.data.samples.source_config import HUB
from raymm.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b.jsonl", "a/c.jsonl.gz", "a.parquet", ".hidden.jsonl", ".cache/d.jsonl", "\u00fc.jsonl",
    ):
        (file := tmp_path / name).parent.mkdir(exist_ok=True)
        file.write_text("")
    return tmp_path


def names(folder, files):
    return [str(file.relative_to(folder)) for file in files]


def test_a_folder_has_its_visible_files_of_the_suffixes(folder):
    assert names(folder, find_files(folder, [".jsonl"])) == [
        "a/c.jsonl.gz", "b.jsonl", "\u00fc.jsonl",
    ]
    assert names(folder, find_files(folder, [".parquet", ".json"])) == ["a.parquet"]
    assert len(visible_files(folder)) == 4


def test_a_file_is_taken_whatever_its_suffix(folder):
    assert find_files(folder / "a.parquet", [".jsonl"]) == [folder / "a.parquet"]


def test_a_pattern_matches_files_alone(folder):
    assert names(folder, find_files(folder / "**" / "*.jsonl*", [])) == [
        "a/c.jsonl.gz", "b.jsonl", "\u00fc.jsonl",
    ]
    assert names(folder, find_files(folder / "a*", [])) == ["a.parquet"]


@pytest.mark.parametrize(("name", "problem"), [
    ("none.jsonl", "data file '.*none.jsonl' does not exist"),
    ("", "folder '.*' has no .csv or .tsv file"),
    ("*.csv", r"pattern '.*\*.csv' has no .csv or .tsv file"),
])
def test_what_is_missing_is_named(folder, name, problem):
    with pytest.raises(DataError, match=problem):
        find_files(folder / name, [".csv", ".tsv"])


def test_paths_and_patterns_are_there_if_a_file_is(folder):
    assert is_there(folder) and is_there(folder / "*.parquet") and is_there(f"{HUB}org/name")
    assert not is_there(folder / "*.csv") and not is_there(folder / "none")


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
