"""Run with one slow replica of its encoder: rebalanced, and resumed from before the decision.

Replicas either take whole microbatches, or share each microbatch by samples.
"""

import json
import shutil

import pytest

import raymm as public
from raymm.monitor.metrics import read_metrics
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.raymm.planning.test_planned_run import tiny_model
from tests.support.tiny_run import curve, save_rows
from tests.training.test_balanced_run import assert_epoch

ROWS = 160
EVERY = 8
# Both modules on both GPUs, one after the other.
MAPPING = Mapping(2, 10, (
    MultiplexStage((Placement("vision", (0, 1), 10),), 1.0),
    MultiplexStage((Placement("llm", (0, 1), 10),), 1.0),
))


@pytest.fixture
def rebalanced(make_config, tmp_path):
    """Return a function that writes configurations with two encoder replicas, one of them slow."""
    save_rows(tmp_path, "train", ROWS, seed=5)

    def make(changes=None):
        return make_config({
            "data.train": str(tmp_path / "train.jsonl"),
            "data.batching": {
                "method": "balanced", "cache": str(tmp_path / "scans"), "rebalance": EVERY,
            },
            "data.batch_size": 12, "data.microbatches": 2,
            "model.packing": True, "model.encoders.vision.preprocess":
                "tests.support.run_processors:one_slow_copy",
            "parallel": {
                "encoders": {"vision": {"dp": 2, "ranks": [0, 1]}},
                "language_model": {"ranks": [0]},
            },
            "run.log_samples": True, "run.checkpoint_every": EVERY // 2,
            "run.keep_checkpoints": ROWS, "optimizer.total_steps": 60,
            **(changes or {}),
        })

    return make


def parts_of(row):
    """Return the samples of every replica of the encoder in a step."""
    parts = row["microbatches"]
    if len(parts) > 1:
        return parts
    half = len(parts[0]) // 2  # shared by samples
    return [parts[0][:half], parts[0][half:]]


def images(row):
    """Return the images of every replica; one row in four has none."""
    return [sum(int(one.split("-")[1]) % 4 > 0 for one in part) for part in parts_of(row)]


@pytest.mark.timeout(900)
@pytest.mark.cells(1)
@pytest.mark.parametrize("split", ["microbatches", "samples"])
def test_a_slow_replica_gets_less_work_also_when_resumed(
    rebalanced, raymm, tmp_path, ray_cluster, split
):
    changes = {}
    if split == "samples":
        plan = public.plan_of_mapping(tiny_model(), MAPPING)
        (tmp_path / "mapped.json").write_text(plan.to_json())
        changes = {"parallel": {"plan": str(tmp_path / "mapped.json")}, "data.microbatches": 1}
    run = tmp_path / "run"
    code, text = raymm("train", rebalanced({**changes, "run.steps": EVERY + 5}))
    assert code == 0, text
    log = [json.loads(line) for line in (run / "rebalancing.jsonl").read_text().splitlines()]
    decision = log[0]["decision"]
    assert log[0]["step"] == EVERY and decision["epoch"] == 0 and log[0]["gain"] > 0.02
    # Counted from 0: steps up to EVERY are done, some more were already distributed.
    assert EVERY <= decision["step"] <= EVERY + 4
    one, other = decision["costs"]["copies"]["vision"]
    slow, fast = (0, 1) if one > other else (1, 0)
    assert max(one, other) > 1.4 * min(one, other)
    assert f"step {EVERY:>5}  rebalanced: from step {decision['step']} of" in text

    before = read_metrics(run / "samples.jsonl")
    curve_before = curve(run)
    of = [images(row) for row in before]
    earlier, later = of[: decision["step"]], of[decision["step"] :]
    if split == "microbatches":
        assert all(abs(parts[slow] - parts[fast]) <= 1 for parts in earlier)
        assert later and all(parts[slow] < parts[fast] - 1 for parts in later)
    else:  # the same number of samples, all without an image
        full = [len(parts_of(row)[fast]) == images(row)[fast] for row in before]
        assert later and all(full[decision["step"] :]) and not all(full[: decision["step"]])

    # A run resumed from an earlier checkpoint takes the same decision, whichever replica is slow
    # now. The number of steps in between depends on the machine.
    for checkpoint in CheckpointStore(run).committed():
        if read_manifest(checkpoint).step > decision["step"]:
            shutil.rmtree(checkpoint)
    latest = CheckpointStore(run).latest()
    assert latest is not None and EVERY <= read_manifest(latest).step <= decision["step"]
    code, text = raymm("train", rebalanced({**changes, "run.steps": 2 * EVERY + 2}))
    assert code == 0 and "resuming from" in text, text
    rows = read_metrics(run / "samples.jsonl")
    assert rows[: len(before)] == before
    assert curve(run)[: len(before)] == curve_before
    after = [json.loads(line) for line in (run / "rebalancing.jsonl").read_text().splitlines()]
    assert after[: len(log)] == log and len(after) > len(log)
    assert_epoch(rows, ROWS)

    costs = [
        row["balance"]["costs"] for row in read_metrics(run / "metrics.jsonl")
        if "costs" in row.get("balance", {})
    ]
    assert costs and all(
        0 < one["efficiency"][how] <= 1 and 0 <= one["dist_ratio"]["vision"][how] < 1
        and one["step_s"][how] > 0
        for one in costs if "efficiency" in one for how in ("predicted", "measured")
    )
    # The figures of this run in benchmarks/RESULTS.md; `pytest -rP` shows them.
    print("copies", one, other, "gain", log[0]["gain"], "error", log[0]["error"])
    for row in read_metrics(run / "metrics.jsonl"):
        if "balance" in row:
            print(row["step"], row["balance"]["copies"], row["balance"].get("costs"))
