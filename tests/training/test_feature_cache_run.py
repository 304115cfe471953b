"""Runs with cached features of a frozen encoder: bitwise equal, and without its instructions.

The instructions are left out once all items of a step are cached.
"""

from pathlib import Path

import pytest

from raymm.monitor.metrics import read_metrics
from tests.support.tiny_run import curve, heldout_rows

VISION = "model.encoders.vision"
STEPS = 8


@pytest.fixture
def changes(inputs, tmp_path):
    return {
        f"{VISION}.train": "frozen", "run.steps": STEPS, "run.eval_every": STEPS,
        "data.heldout": str(inputs / "heldout.jsonl"), "run.checkpoint_every": STEPS,
        "cache": {"features": "disk", "folder": str(tmp_path / "features")},
    }


def encoder_steps(run: Path) -> list[int]:
    rows = read_metrics(run / "metrics.jsonl")
    return [row["step"] for row in rows if row.get("stage_busy", {}).get("vision.0")]


def test_the_encoder_runs_once_per_item(ray_cluster, raymm, changes, make_config, tmp_path):
    def run(name: str, features: str) -> tuple:
        folder = tmp_path / name
        cache = {**changes["cache"], "features": features}
        config = make_config({
            **changes, "cache": cache, "run.storage_path": str(folder),
        })
        code, text = raymm("train", config)
        assert code == 0, text
        return curve(folder), [row["heldout_loss"] for row in heldout_rows(folder)], text

    without = run("without", "none")
    assert encoder_steps(tmp_path / "without") == list(range(1, STEPS + 1))
    first = run("first", "disk")
    assert first[:2] == without[:2]
    assert f"features of vision are kept in {tmp_path / 'features'}" in first[2]
    # 13 samples, 3 steps of 4 per epoch; the second epoch may have the sample that the first left.
    computed = encoder_steps(tmp_path / "first")
    assert {1, 2, 3} <= set(computed) and max(computed) < STEPS

    files = sorted((tmp_path / "features").glob("vision-*/??/*.features"))
    assert len(files) >= 12
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
    again = run("again", "disk")
    assert again[:2] == without[:2]
    assert len(encoder_steps(tmp_path / "again")) <= 3
    assert sorted((tmp_path / "features").glob("vision-*/??/*.features")) == files
    assert run("host", "host")[:2] == without[:2]


def test_frozen_first_blocks_run_once_per_item(
    ray_cluster, raymm, changes, make_config, tmp_path
):
    """Cache the frozen first block of an encoder that is trained from its second block on."""
    def run(name: str, cache: dict | None) -> tuple:
        folder = tmp_path / name
        adapters = {"lora": {"r": 2, "targets": r".*layers\.1\..*(q_proj|fc1)"}}
        own = {**changes, f"{VISION}.train": adapters, "run.storage_path": str(folder)}
        own["run.eval_shuffled"] = False
        own = {**own, "cache": cache} if cache else {n: v for n, v in own.items() if n != "cache"}
        code, text = raymm("train", make_config(own))
        assert code == 0, text
        return curve(folder), [row["heldout_loss"] for row in heldout_rows(folder)], text

    cache = changes["cache"]
    together, _, _ = run("together", None)
    without = run("without", {**cache, "features": "none"})
    for alone, usual in zip(without[0], together, strict=True):
        assert alone == pytest.approx(usual, rel=1e-4)
    first = run("first", cache)
    assert first[:2] == without[:2]
    assert f"features of vision's first 1 blocks are kept in {tmp_path / 'features'}" in first[2]
    assert max(encoder_steps(tmp_path / "first")) < STEPS
    rows = read_metrics(tmp_path / "first" / "metrics.jsonl")
    assert all(row["stage_busy"]["vision.1"] for row in rows if "stage_busy" in row)


def test_features_that_cannot_be_cached_are_reported(ray_cluster, raymm, changes, make_config):
    code, text = raymm("train", make_config({**changes, f"{VISION}.train": "full", "run.steps": 1}))
    assert code == 0 and "features of vision are not kept: its first layer is trained" in text
