"""Runs with non-finite samples, or with a learning rate that makes everything non-finite."""

import json

import pytest

from raymm.cli.main import EXIT_REPEATS
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from tests.support.tiny_run import checkpoint_tensors, curve

ONE_RANK = {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}}


@pytest.fixture
def train(ray_cluster, make_config, raymm, tmp_path):
    """Return a function that trains in file order and returns exit code, output and metrics."""

    def run(steps, **changes):
        code, text = raymm("train", make_config({
            "parallel": ONE_RANK, "data.shuffle": False, "run.steps": steps,
            "optimizer.total_steps": 6, "run.checkpoint_every": 2, **changes,
        }))
        assert "Traceback" not in text
        return code, text, read_metrics(tmp_path / "run" / "metrics.jsonl")

    return run


def test_a_non_finite_sample_is_reported_and_skipped(train, tmp_path):
    """Use the default ``on_error``; a resumed run is bitwise equal."""
    nan = {"data.modalities.vision.processor": "tests.support.run_processors:image_or_nan"}
    code, text, rows = train(5, **nan)
    assert code == 0
    assert ["not_applied" in row for row in rows] == [False, True, False, False, True]
    second = rows[1]
    assert second["loss"] is None and second["grad_norm"] is None
    assert second["learning_rate"] is None and second["skipped"] == 0
    (origin,) = second["not_applied"]["began"]
    assert (origin["module"], origin["stage"], origin["what"]) == ("vision", "vision.0", "output")
    assert (origin["microbatch"], origin["sample_ids"]) == (0, ["train-5"])
    assert (
        "step 2 was not applied: loss nan, gradient norm nan; it began in the output of vision.0, "
        "microbatch 0, samples 'train-5'"
    ) in text
    assert "steps not applied in total: 2 of 5" in text
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not valid JSON
    # The checkpoint due after step 2 is of step 3; the last step always has one.
    assert [folder.name for folder in CheckpointStore(tmp_path / "run").committed()] == [
        "step-00000004", "step-00000005",
    ]
    whole, tensors = curve(tmp_path / "run"), checkpoint_tensors(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "whole")
    for steps in (2, 5):  # resume right after the skipped step
        code, text, rows = train(steps, **nan)
        assert code == 0
    assert curve(tmp_path / "run") == whole
    again = checkpoint_tensors(tmp_path / "run")
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())


def test_consecutive_non_finite_steps_end_the_run(train, tmp_path):
    """Use parameters so large that no result is finite."""
    code, text, rows = train(6, **{
        "optimizer.lr": 1e30, "optimizer.schedule": "constant", "run.max_skipped_steps": 3,
        "run.checkpoint_every": 1, "optimizer.warmup_steps": 0, "optimizer.total_steps": None,
    })
    assert code == EXIT_REPEATS and "the run failed" in text
    applied = ["not_applied" not in row for row in rows]
    assert applied[-3:] == [False] * 3 and len(rows) < 6
    assert "3 steps in a row were not applied" in text and "run.max_skipped_steps is 3" in text
    # No good checkpoint was removed for steps that changed nothing.
    latest = CheckpointStore(tmp_path / "run").latest()
    assert latest.name == f"step-{sum(applied):08d}" and str(latest) in text


def test_non_finite_parameters_are_never_committed(train, tmp_path):
    code, text, rows = train(6, **{
        "optimizer.lr": 1e30, "optimizer.weight_decay": 1e10, "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0, "optimizer.total_steps": None,
        "run.checkpoint_every": 1,
    })
    assert code == EXIT_REPEATS
    assert "no checkpoint of step 1 was written: these tensors are not finite: " in text
    assert "vision/module." in text and "The last checkpoint is none" in text
    assert CheckpointStore(tmp_path / "run").committed() == []
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
