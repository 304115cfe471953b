"""Schemes of file systems, known to fsspec or returned by a user's function."""

import pytest
from pyarrow import fs

from raymm.actors.storage.custom_file_system import custom_file_system, is_custom

VAULT = '''
from pyarrow import fs

def arrow():
    return fs.SubTreeFileSystem({folder!r}, fs.LocalFileSystem())

def failing():
    raise KeyError("token")

def number():
    return 3
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_vault_of_this_test.py").write_text(VAULT.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    return "a_vault_of_this_test"


@pytest.mark.parametrize(("scheme", "due"), [
    ("module:function", True), ("file", True), ("http", False), ("memory", False), ("zip", False),
    ("nothing-of-fsspec", False),
])  # fmt: skip
def test_schemes_that_all_nodes_share(scheme, due):
    assert is_custom(scheme) == due


def test_files_of_a_users_function(module, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    system = custom_file_system(f"{module}:arrow")
    with system.open_input_stream("x.txt") as stream:
        assert stream.read() == b"text"


def test_new_files_of_fsspec_are_listed(tmp_path):
    system = custom_file_system("file")
    for count in (0, 1):
        assert len(system.get_file_info(fs.FileSelector(str(tmp_path)))) == count
        (tmp_path / "new").write_text("")


@pytest.mark.parametrize(("name", "message"), [
    ("failing", "failing raised KeyError: 'token'; accepted"), ("number", "returned int; accepted"),
])
def test_a_function_without_a_file_system_is_named(module, name, message):
    with pytest.raises(ValueError, match=message):
        custom_file_system(f"{module}:{name}")
