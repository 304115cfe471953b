"""Outputs of commands: tested without a trace, and refused with field, value and cause."""

import os
from pathlib import Path

import pytest

from raymm.errors import ConfigError, RunFileError
from raymm.files.output import Output, with_home


def refused(make):
    with pytest.raises((ConfigError, RunFileError)) as error:
        make().check()
    return str(error.value)


def test_a_check_leaves_nothing_behind(tmp_path):
    for output in (
        Output.folder("--out", str(tmp_path / "a" / "b")),
        Output.folder("--out", str(tmp_path / "a"), "x.txt", "y" * 200),
        Output.file("--out", str(tmp_path / "c" / "plan.json"), ".png"),
        Output.new_folder("--out", str(tmp_path / "d" / "export")),
    ):
        output.check()
        assert not list(tmp_path.iterdir())


def test_targets_are_the_file_and_its_relatives(tmp_path):
    output = Output.file("--out", str(tmp_path / "plan.json"), ".png", ".svg")
    assert output.target == tmp_path / "plan.json"
    assert output.files == ("plan.json", "plan.png", "plan.svg")


@pytest.mark.parametrize(("name", "reason"), [
    ("", "it is empty or contains a null character"),
    (" ", "it is empty or contains a null character"),
    ("a\0b", "it is empty or contains a null character"),
    ("..", "it has no file or folder name"),
    ("/", "it has no file or folder name"),
    ("a\ud800", "surrogates not allowed"),
    ("~no_such_user_/x", "there is no user 'no_such_user_'; ./~no_such_user_ is a folder"),
    ("/proc/none/x", "/proc/none: No such file or directory"),
    ("x" * 300, "File name too long"),
])
def test_names_that_cannot_be_written_are_refused(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    text = refused(lambda: Output.file("--out", name))
    assert text.startswith(f"--out is {name!r}; expected a file that can be written: ")
    assert reason in text and not list(tmp_path.iterdir())


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    assert "Not a directory" in refused(lambda: Output.folder("--out", f"{tmp_path}/file/x"))
    assert "it is a folder" in refused(lambda: Output.file("--out", f"{tmp_path}/folder"))
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        assert "it exists" in refused(lambda n=name: Output.new_folder("--out", f"{tmp_path}/{n}"))
    assert (tmp_path / "file").read_text() == "kept"


def test_errors_while_writing_name_the_output(tmp_path):
    output = Output.folder("--out", str(tmp_path / "a"))
    with pytest.raises(RunFileError, match="--out is .*a'; expected a folder.*: No space left"):
        with output.writing() as folder:
            (folder / "kept").write_text("")
            raise OSError(28, "No space left on device")
    assert (tmp_path / "a" / "kept").exists()


def test_home_folders_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert with_home("~/x") == "/somewhere/x" and with_home("a/~") == "a/~"
    assert Path(with_home("~root")) == Path(os.path.expanduser("~root"))
