"""Defects of a VLM's folder, processor or samples are reported before a rank starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.errors import DataError, InputError, SampleError
from raymm.model.vlm_batch import VlmBatchCheck
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny

KIND = "idefics3"


def configuration(tmp_path, model=None, processor=None, **data):
    folder, samples = tiny(KIND)
    values = {
        "run": {"storage_path": str(tmp_path / "run"), "steps": 2, "device": "cpu"},
        "model": {"path": str(model or folder)},
        "data": {
            "train": samples, "processor": str(processor or folder), "batch_size": 4,
            "modalities": modalities(KIND), "microbatches": 2, **data,
        },
        "parallel": {"language_model": {"pp": 1}},
        "resources": {"cpus": 0.1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_missing_shard_is_named(tmp_path):
    folder = Path(tiny(KIND)[0])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    whole.save_pretrained(copy, max_shard_size="200KB")
    lost = sorted(copy.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(InputError, match=lost.name):
        build_model(load_config(configuration(tmp_path, model=copy)))


def test_a_processor_of_another_model_is_refused(tmp_path):
    other = tiny("gemma3")[0]
    with pytest.raises(InputError, match=f"processor in {other!r}.*is that the model's own"):
        build_model(load_config(configuration(tmp_path, processor=other)))


def test_an_item_above_a_budget_is_named_with_its_sample(tmp_path):
    for limit in ({"max_image_pixels": 4}, {"max_length": 8}):
        with pytest.raises(InputError, match="sample-"):
            build_model(load_config(configuration(tmp_path, **limit)))


def test_a_sample_that_the_model_cannot_take_is_named(tmp_path):
    config = load_config(configuration(tmp_path))
    model = build_model(config)
    data = with_vocabulary(config.data, model)
    step = next(iter(local_steps(data, steps=1)))
    batch = dict(step.microbatches[0])
    check = model.batch_check
    check(batch)
    with pytest.raises(DataError, match="pixel_values is of dtype"):
        check({**batch, "pixel_values": batch["pixel_values"].double()})
    with pytest.raises(SampleError, match="sample-.*embeddings for 5 ids"):
        next(iter(local_steps(data.model_copy(update={"vocabulary": 5}), steps=1)))


def test_grids_that_contradict_patches_are_refused():
    ids = torch.ones(1, 6, dtype=torch.int64)
    grid = torch.tensor([[1, 2, 4], [1, 4, 4]])
    batch = {"input_ids": ids, "pixel_values": torch.ones(24, 3), "image_grid_thw": grid}
    towers = {"vision": {"pixel_values": "pixel_values", "grid_thw": "image_grid_thw"}}
    check = VlmBatchCheck.of(towers, batch)
    check({**batch, "labels": ids})
    for changed in (
        {"image_grid_thw": grid + 1}, {"pixel_values": torch.ones(23, 3)},
        {"image_grid_thw": grid[:1]},
    ):
        with pytest.raises(DataError, match="image_grid_thw gives"):
            check({**batch, **changed, "labels": ids})


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_does_not_resume_with_another_processor(tmp_path, capsys):
    processor = tmp_path / "processor"
    shutil.copytree(tiny(KIND)[0], processor)
    file = configuration(tmp_path, processor=processor)
    assert main(["train", str(file)]) == 0
    settings = processor / "processor_config.json"
    values = json.loads(settings.read_text())
    values["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    settings.write_text(json.dumps(values))
    more = ["train", str(file), "--set", "run.steps=3"]
    assert main(more) == 2
    assert "data.processor_files" in capsys.readouterr().err
