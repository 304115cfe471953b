"""Losses of a VLM folder: pairs of answers, and the loss of each source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.model.vlm import label_tokens
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny
from tests.support.tiny_run import curve
from tests.training.test_vlm_folders import configuration, losses_in_one_process

pytestmark = pytest.mark.usefixtures("ray_cluster")
ADAPTED = {"vision": "frozen", "projector": "frozen", "language_model": {"lora": {"r": 2}}}


def rows_of(kind):
    data = Path(tiny(kind)[1])
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows:
        row["images"] = [str(data.parent / image) for image in row["images"]]
    return rows


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def data_of(train, kind="idefics3", **more):
    return {
        "train": train, "modalities": modalities(kind), "batch_size": 4, "microbatches": 2,
        "media_folders": ["/"], **more,
    }


@pytest.mark.cells(1)
@pytest.mark.parametrize(("reference", "train"), [("base", ADAPTED), ("initial", {})])
def test_a_run_on_pairs_equals_one_process_and_resumes(tmp_path, reference, train):
    rows = rows_of("idefics3")
    for row in rows:
        *asked, answer = row.pop("messages")
        wrong = {"role": "assistant", "content": [{"type": "text", "text": "cat cat yes"}]}
        row |= {"prompt": asked, "chosen": [answer], "rejected": [wrong]}
    file, run = configuration(
        tmp_path, data=data_of(written(tmp_path / "pairs.jsonl", rows)),
        model={"path": tiny("idefics3")[0], "train": train,
               "loss": {"dpo": {"beta": 0.5, "reference": reference}}},
    ), tmp_path / "run"
    assert main(["train", str(file), "--set", "run.keep_checkpoints=4"]) == 0
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    losses, whole = [row["loss"] for row in metrics], curve(run)
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert metrics[-1]["rewards/margins"] != 0 and [r["label_tokens"] for r in metrics] == [4] * 4
    if reference == "base":
        assert losses == pytest.approx(losses_in_one_process(load_config(file)), rel=1e-5)
        return  # resumption with adapters is tested in test_preference_run
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    assert main(["train", str(file), "--set", "run.keep_checkpoints=4"]) == 0
    assert curve(run) == whole


def test_the_loss_of_each_source_is_that_of_its_rows(tmp_path):
    rows = rows_of("idefics3")
    parts = {"first": rows[:5], "second": rows[5:]}
    sources = [
        {"path": written(tmp_path / f"{name}.jsonl", part), "name": name}
        for name, part in parts.items()
    ]
    file = configuration(tmp_path, data=data_of(sources))
    assert main(["train", str(file), "--set", "run.steps=1"]) == 0
    (row,) = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    config = load_config(file)
    model = build_model(config)
    (step,) = local_steps(with_vocabulary(config.data, model), steps=1)
    ids = {name: {own["id"] for own in part} for name, part in parts.items()}
    assert sorted(row["source_losses"]) == ["first", "second"]
    for name, loss in row["source_losses"].items():
        alone = []
        for microbatch, meta in zip(step.microbatches, step.meta, strict=True):
            others = torch.tensor([sample not in ids[name] for sample in meta.sample_ids])
            labels = microbatch["labels"].masked_fill(others[:, None], IGNORE_INDEX)
            alone.append({**microbatch, "labels": labels})
        assert row["source_label_tokens"][name] == sum(map(label_tokens, alone))
        assert loss == pytest.approx(model.loss(alone).item(), rel=1e-5)
