"""Batches by measured costs of a VLM folder: decisions repeat on resume, and equal one process."""

from __future__ import annotations

import json
import shutil

import pytest

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import Decision, local_steps, open_split
from raymm.data.loading.processed import measure_of
from raymm.data.sampling.batching import training_sampler
from raymm.monitor.metrics import read_metrics
from raymm.scheduler.minibatch.cost_fit import CostFit
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny
from tests.support.tiny_run import curve
from tests.training.test_vlm_folders import configuration, losses_in_one_process

pytestmark = pytest.mark.usefixtures("ray_cluster")
EVERY, STEPS = 8, 16
# Seconds per unit (a picture, a row: all are equal); the tower's second replica is slower.
SECONDS = {"vision": 1.0, "text": 0.01}
SLOWER = 4


@pytest.fixture
def slow_replica(monkeypatch):
    """Replace the measured seconds by ones that are known, since those of tiny models are noise."""
    observe = CostFit.observe

    def known(self, units, squares, seconds):
        names = [column.name for column in self.columns]
        assert sorted(names) == sorted(SECONDS) and (seconds[:, names.index("vision")] > 0).any()
        seconds = units * [SECONDS[name] for name in names]
        seconds[1::2, names.index("vision")] *= SLOWER
        return observe(self, units, squares, seconds)

    monkeypatch.setattr(CostFit, "observe", known)


@pytest.mark.timeout(900)
def test_decisions_repeat_on_resume_and_equal_one_process(tmp_path, slow_replica, monkeypatch):
    folder, rows = tiny("idefics3")
    batching = {"method": "balanced", "cache": str(tmp_path / "scans"), "rebalance": EVERY}
    file = configuration(
        tmp_path, parallel={"encoders": {"vision": {"dp": 2}}},
        data={
            "train": rows, "modalities": modalities("idefics3"), "batch_size": 4, "microbatches": 2,
            "batching": batching,
        },
    )
    run = tmp_path / "run"
    settings = ("steps", STEPS), ("keep_checkpoints", STEPS), ("log_samples", "true")
    command = ["train", str(file), *(f"--set=run.{name}={value}" for name, value in settings)]
    assert main(command) == 0
    check = json.loads((run / "rebalancing.jsonl").read_text().splitlines()[0])
    decision = Decision(*(check["decision"][name] for name in Decision._fields))
    fast, slow = decision.costs["copies"]["vision"]
    assert check["step"] == EVERY and slow / fast == pytest.approx(SLOWER, rel=1e-3)
    before, samples = curve(run), (run / "samples.jsonl").read_text()
    shown = [row["balance"]["costs"] for row in read_metrics(run / "metrics.jsonl")
             if "costs" in row.get("balance", {})]  # fmt: skip
    assert sorted(shown[-1]["dist_ratio"]) == sorted(SECONDS)

    # A run that resumes before the decision repeats it, although no replica is slow now.
    monkeypatch.undo()
    for checkpoint in CheckpointStore(run).committed():
        if read_manifest(checkpoint).step >= EVERY:
            shutil.rmtree(checkpoint)
    assert main(command) == 0
    assert curve(run) == before and (run / "samples.jsonl").read_text() == samples

    config = load_config(file)
    data = with_vocabulary(config.data, build_model(config))
    sampler = training_sampler(data, open_split(data, "train"), measure=measure_of(data))
    taken = [row["microbatches"] for row in map(json.loads, samples.splitlines())]
    planned = samples_of(data, sampler)
    assert taken[:EVERY] == planned[:EVERY] and taken != planned
    assert len(taken[-1][1]) < len(taken[-1][0])
    decisions = [json.loads(row) for row in (run / "rebalancing.jsonl").read_text().splitlines()]
    sampler.follow({"vision": 2}, [
        Decision(*(row["decision"][name] for name in Decision._fields))
        for row in decisions if row["decision"] is not None
    ])
    assert taken == samples_of(data, sampler)
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert losses == pytest.approx(losses_in_one_process(config, STEPS, sampler), rel=1e-5)


def samples_of(data, sampler):
    """Return the samples of each microbatch of the run's steps."""
    steps = local_steps(data, steps=STEPS, sampler=sampler)
    return [[list(meta.sample_ids) for meta in step.meta] for step in steps]
