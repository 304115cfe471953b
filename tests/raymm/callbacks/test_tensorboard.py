"""Event files of TensorBoard."""

import pytest

from raymm.callbacks.callback import Restart, RunEnd, RunInfo
from raymm.callbacks.tensorboard import TensorBoardCallback


def values(folder, name: str) -> dict[int, float]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulators.EventAccumulator(str(folder))
    reader.Reload()
    return {event.step: event.value for event in reader.Scalars(name)}


def test_a_restart_hides_the_steps_that_are_taken_again(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    callback, run = TensorBoardCallback(), RunInfo("run", tmp_path, 0, 4, {}, {})
    callback.on_start(run)
    for step in (1, 2, 3):
        callback.on_step({"step": step, "loss": 1.0 * step, "stage_busy": {"llm": 0.5}})
    resumed = RunInfo("run", tmp_path, 1, 4, {}, {})
    callback.on_restart(Restart(1, "failure", "rank 0 died", resumed))
    callback.on_step({"step": 4, "loss": 40.0})
    callback.on_evaluation({"step": 4, "heldout_loss": 2.5})
    callback.on_end(RunEnd("finished"))
    assert values(tmp_path / "tensorboard", "loss") == {1: 1.0, 4: 40.0}
    assert values(tmp_path / "tensorboard", "heldout_loss") == {4: 2.5}


def test_a_folder_may_be_given(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    callback = TensorBoardCallback(tmp_path / "elsewhere")
    callback.on_start(RunInfo("run", tmp_path / "run", 0, 4, {}, {}))
    callback.on_step({"step": 1, "loss": 3.0})
    callback.on_end(RunEnd("finished"))
    assert values(tmp_path / "elsewhere", "loss") == {1: 3.0}
