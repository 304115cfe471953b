"""Ids of models on the hub, and folders."""

import pytest

from raymm.actors.weights.hub_folder import is_hub_id, local_folder, pinned, split_id

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(("path", "is_id"), [
    ("org/name", True), ("org/name@main", True), ("org/name@refs/pr/1", True), ("name", False),
    ("./org/name", False), ("/org/name", False), ("org/name/", False), ("a/b/c", False),
    ("../name", False),
])  # fmt: skip
def test_ids_are_told_from_paths(path, is_id):
    assert is_hub_id(path) == is_id


def test_a_folder_of_this_machine_is_not_an_id(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/name")
    assert pinned("org/name") == local_folder("org/name") == "org/name"


def test_a_commit_is_pinned_already():
    assert pinned(f"org/name@{COMMIT}") == f"org/name@{COMMIT}"
    assert split_id("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    assert split_id("org/name") == ("org/name", None)
