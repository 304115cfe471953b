"""Runs with orders per batch: interrupted, killed, and refused."""

import json

import pytest

from raymm.monitor.metrics import read_metrics
from tests.support.tiny_run import STEPS, checkpoint_tensors, curve

PLANNING = {"ranks": 2, "per_batch": True}


def test_a_stop_and_a_killed_rank_change_no_choice(make_config, raymm, tmp_path, ray_cluster):
    """Check bitwise equality with a run that nothing interrupts, under the same plan."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    given = {"data.microbatches": 4, "data.batch_size": 8, "run.log_samples": True}
    planned = {**given, "parallel": None, "planning": PLANNING}
    code, text = raymm("train", make_config({**planned, "run.storage_path": str(whole)}))
    assert code == 0 and "order and schedule of each step by its sizes (" in text, text
    assert f"expected seconds of {STEPS} steps: " in text, text
    expected = [row["expected_step_s"] for row in read_metrics(whole / "metrics.jsonl")
                if "expected_step_s" in row]
    assert len(expected) == STEPS and any(row["per_batch"] < row["plan"] for row in expected)

    plan = str(whole / "plan.json")
    assert json.loads((whole / "plan.json").read_text())["step_schedules"]
    changes = {
        **given, "parallel": {"plan": plan}, "run.storage_path": str(run),
        "run.max_failures": 0, "run.snapshot_every": 2, "optimizer.total_steps": STEPS,
        "run.callbacks": [{"tests.support.killing_callbacks:KillRanks": {"after": [9]}}],
    }
    assert raymm("train", make_config({**changes, "run.steps": 5}))[0] == 0
    code, text = raymm("train", make_config({**changes, "run.steps": STEPS}))
    assert code == 0 and text.count("recovering in place") == 1, text
    assert curve(run) == curve(whole)
    assert read_metrics(run / "samples.jsonl") == read_metrics(whole / "samples.jsonl")
    mine, theirs = checkpoint_tensors(run), checkpoint_tensors(whole)
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[name] == theirs[name]).all()) for name in mine)

    # The same data in its order: the same samples in other microbatches.
    code, text = raymm("train", make_config({
        **planned, "planning": {"ranks": 2}, "run.storage_path": str(tmp_path / "fixed"),
        "run.steps": 4,
    }))
    assert code == 0, text
    orders = [
        [row["microbatches"] for row in read_metrics(folder / "samples.jsonl")][:4]
        for folder in (tmp_path / "fixed", whole)
    ]
    assert orders[0] != orders[1]
    assert [sorted(step) for step in orders[0]] == [sorted(step) for step in orders[1]]


@pytest.mark.parametrize("changes, words", [
    ({}, "planning.per_batch is True, but layouts are given; accepted only for plans that raymm"),
    ({"parallel": {"style": "multiplexed"}},
     "planning.per_batch is True, and parallel.style 'multiplexed'; accepted: style pipelined"),
    ({"parallel": None, "cache": {"features": "host"}, "model.encoders.vision.train": "frozen"},
     "planning.per_batch is true, and cache.features is given; accepted: one of both"),
    ({"parallel": None, "data.batching": {"method": "balanced", "rebalance": {}}},
     "planning.per_batch is true, and data.batching.rebalance is given"),
])  # fmt: skip
def test_what_has_no_orders_is_refused(make_config, raymm, no_new_actors, changes, words):
    code, text = raymm("train", make_config({"planning": PLANNING, **changes}))
    assert code != 0 and words in text, text
