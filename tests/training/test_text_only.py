"""Models with towers on text data, and on data whose first items come late."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForMultimodalLM

from examples.vlm.kinds import KINDS
from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.config.vlm import example_batch
from raymm.data import DataConfig, local_steps
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.monitor.metrics import read_metrics
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny
from tests.support.trainer_groups import trainer_groups

LR, STEPS = 1e-3, 3
ANSWERS = ("Hello. A red circle.", "Hello.", "A blue square. Then", "A low tone.")


def write(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def text_rows(count):
    return [
        {"messages": [
            {"role": "user", "content": "Say something."},
            {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
        ]}
        for number in range(count)
    ]  # fmt: skip


def configuration(folder, kind, file, found, parallel, **train):
    values = {
        "run": {
            "storage_path": str(folder / "run"), "steps": STEPS, "checkpoint_every": STEPS,
            "device": "cpu",
        },
        "model": {"path": tiny(kind)[0], "train": train},
        "data": {
            "train": str(file), "modalities": found, "batch_size": 4, "microbatches": 2,
            "shuffle": False,
        },
        "parallel": parallel,
        "optimizer": {"lr": LR, "max_grad_norm": None, "schedule": "constant", "warmup_steps": 0},
        "resources": {"cpus": 0.1},
    }
    written = folder / "run.yaml"
    written.write_text(yaml.safe_dump(values))
    return written


def losses_of_transformers(config):
    """Return losses of the model in transformers on the same microbatches."""
    model = AutoModelForMultimodalLM.from_pretrained(config.model.path)
    whole = build_model(config)
    assert isinstance(whole, PretrainedVlm)
    trained = set().union(*whole.trained.values())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    rule = config.optimizer.build(STEPS)
    optimizer = torch.optim.AdamW(
        trainer_groups(model, rule.weight_decay), lr=LR, betas=rule.betas, eps=rule.eps
    )
    losses = []
    for step in local_steps(with_vocabulary(config.data, whole), steps=STEPS):
        optimizer.zero_grad()
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step.microbatches)
        loss = sum(
            model(**batch, use_cache=False).loss * int((batch["labels"][:, 1:] != -100).sum())
            for batch in step.microbatches
        ) / labels
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_run(file, tower):
    """Check the losses of a run, and that it leaves the tower and the projector unchanged."""
    assert main(["train", str(file)]) == 0
    config = load_config(file)
    rows = read_metrics(Path(config.run.storage_path) / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(losses_of_transformers(config), abs=1e-6)
    out = file.parent / "out"
    assert main(["export", str(file), "--out", str(out)]) == 0
    before, after = (
        AutoModelForMultimodalLM.from_pretrained(folder).state_dict()
        for folder in (config.model.path, out)
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not [name for name in changed if tower in name or "projector" in name]


@pytest.mark.cells(4)
@pytest.mark.parametrize("kind", KINDS)
def test_towers_are_found_without_items_in_the_data(kind, tmp_path):
    file = write(tmp_path, text_rows(4))
    folder, _ = tiny(kind)
    found, due = (
        from_pretrained(folder, example_batch(DataConfig.model_validate({
            "train": str(data), "processor": folder, "batch_size": 4, "microbatches": 2,
            "modalities": own,
        })))
        for data, own in ((file, {}), (tiny(kind)[1], modalities(kind)))
    )  # fmt: skip
    assert found.tower_names == due.tower_names
    for tower, other in zip(found.towers, due.towers, strict=True):
        assert (tower.call, tower.places, tower.root) == (other.call, other.places, other.root)


@pytest.mark.cells(1)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("kind", "tower", "parallel"), [
    ("gemma3", "vision", {"language_model": {"pp": 2}, "encoders": {"vision": {"pp": 2}}}),
    ("qwen3_vl", "visual", {"language_model": {"cp": 2}, "encoders": {"vision": {}}}),
    ("idefics3", "vision", {
        "language_model": {"dp": 2, "sharding": "fsdp"},
        "encoders": {"vision": {"dp": 2, "sharding": "fsdp"}}}),
    ("qwen2_audio", "audio_tower", {
        "language_model": {"pp": 2}, "encoders": {"audio": {}}}),
    ("llava_onevision", "vision", {
        "language_model": {"tp": 2}, "encoders": {"vision": {"tp": 2}}}),
])  # fmt: skip
def test_text_trains_the_language_model_and_leaves_the_tower(kind, tower, parallel, tmp_path):
    file = write(tmp_path, text_rows(12))
    check_run(configuration(tmp_path, kind, file, {}, parallel), tower)


@pytest.mark.usefixtures("ray_cluster")
def test_trained_towers_without_items_stay_unchanged(tmp_path):
    file = write(tmp_path, text_rows(12))
    parallel = {"language_model": {}, "encoders": {"vision": {}}}
    check_run(configuration(
        tmp_path, "gemma3", file, {}, parallel, vision="full", projector="full"
    ), "vision")  # fmt: skip


@pytest.mark.usefixtures("ray_cluster")
def test_items_that_come_late_in_the_file_are_trained_on(tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 48), "red").save(tmp_path / "a.png")
    late = {
        "messages": [
            {"role": "user", "content": "<image>What is in the picture?"},
            {"role": "assistant", "content": "A red square."},
        ],
        "images": ["a.png"],
    }
    rows = text_rows(8)
    rows = [{**row, "images": []} for row in rows]
    file = write(tmp_path, [*rows, late, *rows[:2], late])
    parallel = {"language_model": {"pp": 2}, "encoders": {"vision": {}}}
    written = configuration(
        tmp_path, "gemma3", file, {"image": {"column": "images"}}, parallel
    )
    assert main(["train", str(written)]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
              if "loss" in row]  # fmt: skip
    assert losses == pytest.approx(losses_of_transformers(load_config(written)), abs=1e-6)
