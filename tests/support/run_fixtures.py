"""Fixtures: one finished run that many tests read, and calls of the command line."""

import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from raymm.cli.main import main
from raymm.storage.checkpoint import CheckpointStore
from tests.support.tiny_run import STEPS, change, prepare, settings, write_config


@dataclass(frozen=True)
class FinishedRun:
    """Run of :data:`STEPS` steps without interruption."""

    config: str
    path: Path
    output: str

    def copy_until(self, target: Path, step: int) -> Path:
        """Copy the run folder with ``step`` as its last checkpoint, and with all its metrics."""
        shutil.copytree(self.path, target)
        for folder in CheckpointStore(target).committed():
            if folder.name != f"step-{step:08d}":
                shutil.rmtree(folder)
        assert CheckpointStore(target).latest() is not None
        return target


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Return the folder with all inputs of runs: tokenizer, models, images, rows."""
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def make_config(inputs, tmp_path, blank_pictures) -> Callable[..., str]:
    """Return a function that writes a configuration of the standard run to ``tmp_path / "run"``.

    Changes are ``{"section.key": value}`` (None removes the key).
    """

    def make(changes: dict[str, Any] | None = None, name: str = "config.yaml") -> str:
        values = settings(inputs, tmp_path / "run", STEPS)
        for path, value in (changes or {}).items():
            change(values, path, value)
        total = values["optimizer"].get("total_steps")
        if total is not None:  # a run may not be longer than its schedule
            values["optimizer"]["total_steps"] = max(total, values["run"]["steps"])
        return write_config(values, tmp_path / name)

    return make


@pytest.fixture(scope="session")
def finished(inputs, tmp_path_factory, ray_cluster) -> FinishedRun:
    """Return the run that others are compared with; it also evaluates, which must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    values = settings(inputs, folder / "run", STEPS)
    change(values, "data.heldout", str(inputs / "heldout.jsonl"))
    change(values, "run.eval_every", STEPS)
    change(values, "run.keep_checkpoints", 4)
    config = write_config(values, folder / "config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with redirect_stdout(StringIO()) as output:
            assert main(["train", config]) == 0
    return FinishedRun(config, folder / "run", output.getvalue())


@pytest.fixture
def raymm(capsys):
    """Return a function that calls the command line here and returns exit code and output."""

    texts = []

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(list(arguments))
        printed = capsys.readouterr()
        texts.append(printed.out + printed.err)
        return code, texts[-1]

    yield call
    print(*texts, sep="\n")  # shown if the test fails


@pytest.fixture
def no_new_actors(ray_cluster):
    """Fail the test if it creates an actor."""
    import ray._private.state

    before = set(ray._private.state.actors())
    yield
    assert set(ray._private.state.actors()) == before
