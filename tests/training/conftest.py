"""One finished run that many tests look at, and ways to call the command line."""

import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tiny_run import STEPS, change, prepare, settings, write_config

from raymm.cli.main import main
from raymm.storage.checkpoint import CheckpointStore


@dataclass(frozen=True)
class FinishedRun:
    """A run of :data:`STEPS` steps without interruption."""

    config: str
    path: Path
    output: str

    def copy_until(self, target: Path, step: int) -> Path:
        """A run folder whose last checkpoint is that of ``step``, with all its metrics."""
        shutil.copytree(self.path, target)
        for folder in CheckpointStore(target).committed():
            if folder.name != f"step-{step:08d}":
                shutil.rmtree(folder)
        assert CheckpointStore(target).latest() is not None
        return target


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """What runs read: tokenizer, models, images, rows."""
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def make_config(inputs, tmp_path) -> Callable[..., str]:
    """Writes a configuration of the standard run to ``tmp_path / "run"``; changes as
    ``{"section.key": value}`` (None removes the key)."""

    def make(changes: dict[str, Any] | None = None, name: str = "config.yaml") -> str:
        values = settings(inputs, tmp_path / "run", STEPS)
        for path, value in (changes or {}).items():
            change(values, path, value)
        total = values["optimizer"].get("total_steps")
        if total is not None:  # no run may be longer than its schedule
            values["optimizer"]["total_steps"] = max(total, values["run"]["steps"])
        return write_config(values, tmp_path / name)

    return make


@pytest.fixture(scope="session")
def finished(inputs, tmp_path_factory, ray_cluster) -> FinishedRun:
    """The run that others are compared with; it also evaluates, which must change nothing."""
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
    """Calls the command line in this process; returns exit code and everything printed."""

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
    """Fails the test if it creates an actor."""
    import ray._private.state

    before = set(ray._private.state.actors())
    yield
    assert set(ray._private.state.actors()) == before
