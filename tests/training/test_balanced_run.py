"""Runs with planned microbatches: interrupted, under another layout, rejected."""

import pytest

from raymm.monitor.metrics import SampleLog, read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest, write_manifest
from tests.support.tiny_run import curve, remove_checkpoints, save_rows

ROWS = 41
COPIES = {"language_model": {"dp": 2, "ranks": [0, 1]}, "encoders": {"vision": {"ranks": [0]}}}


@pytest.fixture
def balanced(make_config, tmp_path):
    """Return a function that writes configurations of a packed run over :data:`ROWS` rows.

    The run logs its samples.
    """
    save_rows(tmp_path, "train", ROWS, seed=5)

    def make(changes=None, method="balanced"):
        return make_config({
            "data.train": str(tmp_path / "train.jsonl"),
            "data.batching": {"method": method, "cache": str(tmp_path / "scans")},
            "model.packing": True, "run.log_samples": True,
            **(changes or {}),
        })

    return make


def sample_rows(run):
    return read_metrics(run / "samples.jsonl")


def samples_of(rows):
    return [one for row in rows for part in row["microbatches"] for one in part]


def assert_epoch(rows, samples=ROWS):
    """Check that the first steps contain every sample once, and end with the epoch."""
    seen = []
    for row in rows:
        seen += samples_of([row])
        if len(seen) >= samples:
            break
    assert sorted(seen) == sorted(f"train-{number}" for number in range(samples))


def test_resume_with_other_replicas_and_microbatches(
    balanced, raymm, tmp_path, ray_cluster
):
    """Resume in the middle of an epoch, before the last steps; every sample still occurs once.

    The run resumes with two replicas of the language model and four microbatches instead of two.
    """
    run, taken = tmp_path / "run", 4
    assert raymm("train", balanced({"run.steps": 6, "optimizer.total_steps": 13}))[0] == 0
    remove_checkpoints(run, after=taken)
    before = sample_rows(run)
    assert len(before) == 6 and len(samples_of(before)) < ROWS
    assert all(len(row["microbatches"]) == 2 for row in before)

    code, text = raymm("train", balanced({
        "parallel": COPIES, "data.microbatches": 4, "run.steps": taken + 9,
        "optimizer.total_steps": 13,
    }))
    assert code == 0 and "resuming from" in text, text
    rows = sample_rows(run)
    assert [row["step"] for row in rows] == list(range(1, taken + 10))
    assert rows[:taken] == before[:taken]
    assert max(len(row["microbatches"]) for row in rows[taken:]) == 4
    assert_epoch(rows)
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert all(0 < row["balance"]["copies"]["llm"] <= 1 for row in metrics[taken:])
    assert all(row["balance"]["copies"] == {} for row in metrics[:taken])
    assert sum(row["data_wait_s"] for row in metrics[:taken]) > 0


def test_a_resumed_run_equals_an_uninterrupted_one(balanced, raymm, tmp_path, ray_cluster):
    run = tmp_path / "run"
    code, text = raymm("train", balanced({"run.steps": 6}))
    assert code == 0 and "batching balanced: 41 samples" in text and "balance: " in text
    samples, whole = sample_rows(run), curve(run)
    remove_checkpoints(run, after=4)
    code, text = raymm("train", balanced({"run.steps": 6}))
    assert code == 0 and "step-00000004" in text
    assert sample_rows(run) == samples
    assert curve(run) == whole


def test_a_step_may_have_fewer_microbatches_than_replicas(balanced, raymm, tmp_path, ray_cluster):
    """Use five samples: the second step has one microbatch, so one of two replicas has no work."""
    save_rows(tmp_path, "train", 5, seed=5)
    code, _ = raymm("train", balanced(
        {"parallel": COPIES, "run.steps": 4}, method="length_grouped"
    ))
    assert code == 0
    rows = sample_rows(tmp_path / "run")
    assert [len(row["microbatches"]) for row in rows] == [2, 1, 2, 1]
    assert sorted(samples_of(rows)) == sorted(2 * [f"train-{number}" for number in range(5)])


def test_another_batching_is_refused_before_anything_starts(
    finished, balanced, make_config, raymm, tmp_path, no_new_actors
):
    run = finished.copy_until(tmp_path / "run", 8)
    code, text = raymm("train", make_config({"data.batching": "balanced"}))
    assert code == 2 and "DataError" in text and "data.batching is 'balanced'" in text
    folder = CheckpointStore(run).latest()
    position = {"data": {"epoch": 1, "sizes": "0", "taken": []}}
    write_manifest(folder, read_manifest(folder).model_copy(update={"trainer": position}))
    code, text = raymm("train", make_config())
    assert code == 2 and "DataError" in text and "data.batching is 'random'" in text
    assert "Traceback" not in text


def test_samples_after_the_checkpoint_are_logged_once(tmp_path):
    log = SampleLog(tmp_path / "samples.jsonl")
    for step in (1, 2, 3):
        log.add(step, [("a", "b"), ("c",)], ["d"])
    SampleLog(tmp_path / "samples.jsonl", resume_step=2).add(3, [["e"]], [])
    assert read_metrics(tmp_path / "samples.jsonl") == [
        {"step": 1, "microbatches": [["a", "b"], ["c"]], "skipped": ["d"]},
        {"step": 2, "microbatches": [["a", "b"], ["c"]], "skipped": ["d"]},
        {"step": 3, "microbatches": [["e"]], "skipped": []},
    ]
