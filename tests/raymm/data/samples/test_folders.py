"""Rows may only name files in their source's folder, unless others are allowed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data.readers import JsonDataset, ReaderOptions
from raymm.data.samples.folders import MediaFolders
from raymm.errors import DataError, SampleError


def rows(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "train.jsonl"
    lines = [json.dumps({"text": "a", "images": name}) for name in names]
    file.write_text("\n".join(lines) + "\n")
    return file


def opened(file: Path, *allowed: str, skip: bool = False) -> JsonDataset:
    return JsonDataset(file, {"vision": "images"}, ReaderOptions(media_folders=allowed, skip=skip))


@pytest.mark.parametrize("name", [
    "../secret.png", "sub/../../secret.png", "/etc/passwd", "{tmp}/secret.png", "..",
    "{tmp}/data-of-others/a.png",
])
def test_paths_outside_the_folder_are_refused_on_opening(tmp_path, name):
    (tmp_path / "secret.png").touch()
    file = rows(tmp_path / "data", "a.png", name.format(tmp=tmp_path))
    with pytest.raises(DataError, match=r"train.jsonl:2: column 'images' names .*media_folders"):
        opened(file)
    dataset = opened(file, skip=True)
    assert dataset.counts["vision"].tolist() == [1, 0]
    with pytest.raises(SampleError, match="outside of the source's folder"):
        dataset[1]


@pytest.mark.parametrize(
    "name", ["a.png", "sub/../a.png", "./sub//b.png", "{tmp}/data/a.png", "..a"]
)
def test_files_within_the_folder_are_found(tmp_path, name):
    name = name.format(tmp=tmp_path)
    (media,) = opened(rows(tmp_path / "data", name))[0].media["vision"]
    assert media == os.path.normpath(tmp_path / "data" / name)


def test_folders_that_are_allowed(tmp_path):
    name = str(tmp_path / "other" / "a.png")
    file = rows(tmp_path / "data", name)
    for allowed in (str(tmp_path / "other"), f"{tmp_path}/other/", str(tmp_path), "/"):
        assert opened(file, allowed)[0].media["vision"] == (name,)
    with pytest.raises(DataError, match="names"):
        opened(file, str(tmp_path / "oth"))


def test_links_of_folders_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    file = rows(tmp_path / "data", "linked/a.png")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "disk")
    with pytest.raises(DataError, match=f"which is {tmp_path}/disk/a.png"):
        opened(file)
    assert opened(file, str(tmp_path / "disk"))[0].media["vision"]


def test_a_source_behind_a_link_is_its_own_folder(tmp_path):
    rows(tmp_path / "disk", "a.png")
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    assert opened(tmp_path / "data" / "train.jsonl")[0].media["vision"]


def test_a_file_that_is_a_link_is_refused_when_it_is_read(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    file = rows(tmp_path / "data", "a.png", "b.png")
    (tmp_path / "data" / "b.png").write_bytes(b"mine")
    (tmp_path / "data" / "a.png").symlink_to(secret)
    dataset = opened(file)
    with pytest.raises(SampleError, match=f"which is {secret}, outside"):
        dataset[0]
    assert dataset[1].media["vision"]
    assert opened(file, str(tmp_path))[0].media["vision"]


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "", "/"]), min_size=1, max_size=6))
def test_accepted_names_match_the_file_system(parts):
    """Compare with the file system: without links, accepted names are exactly those inside."""
    own = Path("/nowhere/own")
    name = "/".join(parts)
    real = os.path.realpath(own / name)
    try:
        path = MediaFolders(own).path(name, "images")
    except SampleError:
        assert not real.startswith("/nowhere/own/")
    else:
        assert path == real and real.startswith("/nowhere/own/")
