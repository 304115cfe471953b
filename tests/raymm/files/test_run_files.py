"""Files of a run: complete writes, and errors with file and cause."""

import pytest

from raymm.actors.storage.folder import PARTIAL
from raymm.errors import RunFileError
from raymm.files.run_files import append, remove_partial, write_whole, writing


def test_texts_are_replaced_and_appended(tmp_path):
    file = tmp_path / "a.txt"
    write_whole(file, "one\u00fc\n")
    append(file, "two\n", durable=True)
    append(file, "")
    assert file.read_text(encoding="utf-8") == "one\u00fc\ntwo\n"
    write_whole(file, "")
    assert file.read_bytes() == b"" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("write", [write_whole, append])
def test_a_missing_folder_is_named(tmp_path, write):
    file = tmp_path / "none" / "a.txt"
    with pytest.raises(RunFileError, match=f"cannot write {file}: No such file or directory"):
        write(file, "text")


def test_a_full_device_is_an_error_of_the_file():
    with pytest.raises(RunFileError, match="cannot write /dev/full: No space left on device"):
        append("/dev/full", "text")


def test_the_first_file_is_named_by_nested_blocks():
    with pytest.raises(RunFileError, match="cannot write inner: gone"):
        with writing("outer"), writing("inner"):
            raise OSError("gone")


def test_incomplete_files_are_removed_and_no_others(tmp_path):
    kept = [tmp_path / "a", tmp_path / f"b{PARTIAL}", tmp_path / ".hidden"]
    for file in (*kept, tmp_path / f".c{PARTIAL}"):
        file.write_text("")
    (folder := tmp_path / f".export{PARTIAL}").mkdir()
    assert remove_partial(tmp_path) == [tmp_path / f".c{PARTIAL}"]
    assert sorted(tmp_path.iterdir()) == sorted([*kept, folder])
