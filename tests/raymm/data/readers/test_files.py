"""Data files of a path, folder or pattern."""

import pytest

from raymm.data.readers.files import find_files, is_there, visible_files
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
