"""Runs that continue while the disk of their folder is full."""

import pytest

from raymm.data import Decision
from raymm.errors import RunFileError
from raymm.monitor.metrics import read_metrics
from raymm.monitor.rebalancing import DecisionLog
from raymm.storage.checkpoint import CheckpointStore
from tests.support.tiny_run import STEPS, curve


def test_a_full_disk_loses_no_step_and_no_row(
    finished, make_config, raymm, small_disk
):
    """Skip the checkpoint that is due meanwhile, and write later ones."""
    run = small_disk.path / "run"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.log_samples": True, "run.checkpoint_every": 4,
        "run.callbacks": [
            {"tests.support.killing_callbacks:FillDisk": {
                "folder": str(small_disk.path), "after": 1, "until": 7,
            }},
        ],
    }))
    assert code == 0, text
    assert "jsonl: No space left on device. The run continues" in text, text
    assert "jsonl is writable again and has all rows" in text
    assert "the run continues and saves at the next checkpoint" in text.lower()
    assert curve(run) == curve(finished.path)
    steps = [row["step"] for row in read_metrics(run / "samples.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    assert CheckpointStore(run).latest().name == f"step-{STEPS:08d}"


@pytest.mark.parametrize("exists", [True, False])
def test_a_start_on_a_full_disk_exits_with_1_and_no_files(
    exists, make_config, raymm, small_disk
):
    """Exit with 1: the input is valid, and the same command runs once there is room."""
    run = small_disk.path / "run"
    if exists:
        run.mkdir()
    small_disk.fill()
    code, text = raymm("train", make_config({"run.storage_path": str(run)}))
    assert code == 1, text
    assert "the run failed" in text and f"run.storage_path is {str(run)!r}; expected" in text
    assert "No space left on device" in text and "Traceback" not in text
    assert not run.exists() or not list(run.iterdir())


def test_an_unwritten_decision_is_not_in_the_log(small_disk):
    log = DecisionLog(small_disk.path / "rebalancing.jsonl", "digest")
    small_disk.fill()
    with pytest.raises(RunFileError, match="No space left"):
        log.add({"step": 1}, Decision(0, 1, {}))
    assert log.decisions == [] and log.last_step == 0
    small_disk.empty()
    log.add({"step": 2}, Decision(0, 2, {}))
    assert DecisionLog(small_disk.path / "rebalancing.jsonl", "digest").last_step == 2
