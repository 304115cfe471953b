"""Run whose processes are lost continues in the remaining ones, bit for bit."""

import random

import pytest

from raymm.cli.main import EXIT_RUN_FAILED
from raymm.monitor.metrics import read_metrics
from raymm.recovery import failure_policy
from tests.support.killing_callbacks import make_faults_again
from tests.support.tiny_run import STEPS, curve, heldout_rows
from tests.support.watching_callbacks import CALLS

KILL = "tests.support.killing_callbacks:KillRanks"
KILL_WORKER = "tests.support.killing_callbacks:KillDataWorker"


@pytest.fixture
def calls():
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def test_in_place_recovery_does_not_change_any_loss(
    finished, make_config, raymm, tmp_path, calls, inputs
):
    """Kill ranks, one of them before the first checkpoint, and a data worker."""
    step, rank = random.randrange(7, STEPS - 2), random.randrange(2)
    run = tmp_path / "killed"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 1,
        "run.log_samples": True, "data.heldout": str(inputs / "heldout.jsonl"),
        "run.eval_every": STEPS, "run.callbacks": [
            {KILL: {"after": [1, step], "rank": rank}},
            {KILL_WORKER: {"after": [4]}}, "tests.support.watching_callbacks:Recorder",
        ],
    }))
    assert code == 0, text
    assert text.count("recovering in place") == 3, text
    assert curve(run) == curve(finished.path), (step, rank)
    assert heldout_rows(run) == heldout_rows(finished.path)
    rows = read_metrics(run / "samples.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    restarts = [value for kind, value in calls if kind == "restart"]
    assert [restart.cause for restart in restarts] == ["failure"] * len(restarts)
    assert [kind for kind, _ in calls if kind in ("start", "end")] == ["start", "end"]


def test_a_lasting_shortage_ends_the_run_after_retries(
    make_config, raymm, ray_cluster, monkeypatch
):
    """Check that the run retries, as the resource may become available."""
    monkeypatch.setattr(failure_policy, "RETRY_WAITS_S", (0.0, 0.1, 0.2))
    code, text = raymm("train", make_config({
        "model.encoders.vision.preprocess":
            "tests.support.killing_callbacks:has_no_memory_in_ranks",
        "run.snapshot_every": 1,
    }))
    assert code == EXIT_RUN_FAILED, text
    assert text.count("recovering in place") == 3, text
    assert "retries after 0, 0.1, 0.2 s did not help in step 1" in text
    assert "The same command would fail in the same way" not in text
    first = text.index("Earlier interruption 1, in step 1: rank 0 (stages vision.0, llm.0) failed")
    assert "MemoryError: no memory for this image" in text[first:] and first > text.index("failed:")


def test_temporary_shortages_do_not_change_any_loss(finished, make_config, raymm, tmp_path):
    """Fail once to start a thread in a rank, and to open a file in a data worker.

    The sample of that file is not skipped.
    """
    make_faults_again()
    run = tmp_path / "short"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 1,
        "model.encoders.vision.preprocess": "tests.support.killing_callbacks:lacks_a_thread_once",
        "data.modalities.vision.processor":
            "tests.support.killing_callbacks:image_without_files_once",
        "data.on_error": "skip",
    }))
    assert code == 0, text
    assert "RuntimeError: can't start new thread: recovery" in text, text
    assert "Too many open files" in text and "skipped" not in text, text
    assert text.count("after a wait of 1 s; recovering in place") == 2, text
    assert curve(run) == curve(finished.path)
