"""Input files and output paths of commands.

A defect ends the command with exit code 2 and a message that names the file, before anything is
measured or started.
"""

import json
import os
from pathlib import Path

import pytest
import ray

PLAN = ("--ranks", "2", "--set", "parallel={}")
MULTIPLEX = ("--style", "multiplexed", "--device", "H100", *PLAN)
# Commands that read a file, by option.
READERS = {
    "profile": lambda config, file: ["plan", config, *PLAN, "--profile", file],
    "surfaces": lambda config, file: ["plan", config, *MULTIPLEX, "--profile", file],
    "interference": lambda config, file: ["plan", config, *MULTIPLEX, "--interference", file],
    "planning.profile": lambda config, file: [
        "plan", config, *PLAN, "--set", f"planning.profile={file}"
    ],
    "plan": lambda config, file: ["train", config, "--set", f"parallel={{plan: '{file}'}}"],
    "configuration": lambda config, file: ["train", file],
    "trace": lambda config, file: ["trace", str(Path(file).parent)],
    "weights": lambda config, file: [
        "train", config, "--set",
        "model.encoders.vision={factory: 'tests.support.run_processors:small_cnn', "
        f"hidden_size: 8, weights: '{file}'}}",
    ],
}
# Content of the file; None for a missing file, ... for a folder.
CONTENTS = [
    None, ..., b"", '{"a": "é"}'.encode("latin-1"), b'{"a": [1, 2', b"[" * 100_000, b"null", b"1",
    b'"x"', b"[]", b"{}", b"[1]", b'{"stages": 3}', b'{"modules": 1}', b'{"surfaces": 1}',
    b'{"traceEvents": 1}',
]
WRITERS = {
    "profile": lambda config, out: ["profile", config, "--out", out],
    "surfaces": lambda config, out: ["profile", "--multiplex", config, "--out", out],
    "plan": lambda config, out: ["plan", config, *PLAN, "--out", out],
    "mapping": lambda config, out: ["plan", config, *MULTIPLEX, "--out", out],
    "export": lambda config, out: ["export", config, "--out", out],
    "run": lambda config, out: ["train", config, "--set", f"run.storage_path={json.dumps(out)}"],
}


@pytest.fixture
def command(raymm, make_config, monkeypatch):
    """Return the command line without Ray, and a configuration."""

    def refuse(*arguments, **options):
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr(ray, "init", refuse)
    config = make_config()
    return lambda make, file: raymm(*make(config, str(file)))


@pytest.mark.parametrize("reader", READERS)
def test_files_that_cannot_be_read(reader, command, tmp_path):
    # It is read after the costs are computed, which takes time.
    contents = CONTENTS[::3] if reader == "interference" else CONTENTS
    for number, content in enumerate(contents):
        file = tmp_path / str(number) / "trace.json"
        file.parent.mkdir()
        if content is ...:
            file.mkdir()
        elif content is not None:
            file.write_bytes(content)
        code, text = command(READERS[reader], file)
        assert code == 2 and str(file.parent) in text, (content, text)
        assert "Traceback" not in text


@pytest.mark.parametrize("writer", WRITERS)
def test_paths_that_cannot_be_written(writer, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    for name in ("plan.json", "f.png", "f.interference.json"):
        (tmp_path / "taken" / name).mkdir(parents=True)
    (tmp_path / "taken" / "f.json").symlink_to(tmp_path / "nowhere" / "f")
    before = sorted(tmp_path.rglob("*"))
    places = [
        "file/f.json", "/proc/f.json", "/proc/new/f.json", "/dev/null/f.json", "", " ", "a\0.json",
        f"{'n' * 300}.json", f"{'n' * 250}/" * 20 + "f.json", "~nobody-of-this-name/f.json",
        "taken" if writer in ("plan", "mapping") else "taken/f.json", "\ud800.json",
    ]
    if writer == "run":
        places.remove("taken/f.json")
    for place in places:
        code, text = command(WRITERS[writer], place)
        field = {"run": "run.storage_path", "export": "output"}.get(writer, "--out")
        assert code == 2 and field in text, (place, text)
        assert repr(place) in text or place in text
        assert sorted(tmp_path.rglob("*")) == before, place  # new files are removed again


def test_a_home_folder_in_an_option_is_expanded(command, make_config, tmp_path, monkeypatch):
    """Check a tilde that the shell does not expand: ``--out=~/x``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    code, text = command(WRITERS["plan"], "~/plans")
    assert code == 0 and f"wrote {tmp_path / 'home' / 'plans' / 'plan.json'}" in text
    assert os.listdir(tmp_path / "home" / "plans")
    assert not (tmp_path / "~").exists()
