"""Failures of ranks, from how their calls ended."""


import traceback
from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from raymm.actors.faults.diagnosis import faults_kept_in, first_line, keep, raised
from raymm.errors import FailureKind, RankFailedError

NAMES = ["rank 0 (llm)", "rank 1 (vision)"]


def raised_error(error):
    try:
        raise error
    except type(error):
        return RayTaskError("step", traceback.format_exc(), error)


def test_an_error_of_user_code_replaces_no_process():
    failure = raised(1, raised_error(ValueError("bad batch")), NAMES)
    assert failure.message == "rank 1 (vision) failed: ValueError: bad batch"
    assert failure.own and failure.lost == frozenset()
    assert failure.raised is FailureKind.USER
    assert "bad batch" in failure.texts["rank-1.txt"]
    error = failure.error("text")
    assert isinstance(error, RankFailedError) and str(error) == "text"


def test_an_unexpected_error_shows_where_it_was_raised():
    failure = raised(0, raised_error(ZeroDivisionError("zero")), NAMES)
    assert "ZeroDivisionError: zero\n" in failure.message
    assert "in raised_error" in failure.message


def test_a_failed_device_loses_its_rank():
    failure = raised(1, raised_error(torch.AcceleratorError("ECC error")), NAMES)
    assert failure.lost == {1} and failure.raised is None and not failure.own


@pytest.mark.parametrize(("error", "reason"), [
    (KeyError("a"), "it could not start: KeyError: 'a', raised in started (model.py, line 7)"),
    (ModuleNotFoundError("No module named 'x'"),
     "it could not start: ModuleNotFoundError: No module named 'x', raised in started (model.py, "
     "line 7). Ranks can import installed packages"),
])
def test_a_failed_start_is_named_with_its_place(error, reason):
    text = (
        f'Traceback (most recent call last):\n  File "model.py", line 7, in started\n    x\n'
        f"{type(error).__name__}: {error}"
    )
    assert first_line(ActorDiedError(RayTaskError("__init__", text, error))).startswith(reason)


def test_texts_are_in_the_run_folder(tmp_path):
    with faults_kept_in(tmp_path / "outer"), faults_kept_in(tmp_path / "run"):
        folder = Path(keep({"rank-0.txt": "stack", "rank-1.txt": "bad \udcff"}))
    assert folder.parent == tmp_path / "run" / "faults"
    assert {file.name for file in folder.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    assert (folder / "rank-0.txt").read_text() == "stack"


def test_a_folder_that_cannot_be_written_is_no_second_fault(tmp_path):
    (tmp_path / "faults").write_text("in the way")
    with faults_kept_in(tmp_path):
        assert keep({"rank-0.txt": "stack"}).startswith("not saved: ")
