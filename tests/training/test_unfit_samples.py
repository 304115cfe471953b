"""Samples on disk that the model cannot take are reported before a rank receives them."""

import json

import pytest
from PIL import Image
from ray import cloudpickle

from raymm.batch.check import PartsCheck
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import StepBuilder, open_split
from raymm.errors import SampleError
from raymm.monitor.metrics import read_metrics

GPT2 = {
    "model_type": "gpt2", "vocab_size": 22, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "n_positions": 40,
}


@pytest.fixture
def rows(tmp_path):
    """Return eight samples with an image each, two of them unfit.

    The third's image has another size; the sixth's text is longer than the model's positions, with
    the image's four tokens.
    """
    lines = []
    for number in range(8):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (12, 12) if number == 2 else (8, 8), (20 * number, 0, 0)).save(file)
        words = "red " * (34 if number == 5 else 3)
        lines.append(json.dumps({
            "id": f"row-{number}", "images": [str(file)],
            "messages": [
                {"role": "user", "content": "what"}, {"role": "assistant", "content": words},
            ],
        }))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def unfit_config(make_config, rows):
    return make_config({
        "data.train": rows, "data.max_length": 60, "data.shuffle": False, "run.steps": 2,
        "data.modalities.vision.processor": "tests.support.run_processors:natural_image",
        "data.on_error": "skip", "model.language_model.config": GPT2,
        "run.storage_path": rows.replace("rows.jsonl", "run"), "optimizer.total_steps": None,
        "optimizer.warmup_steps": None,
    })


def test_samples_that_do_not_fit_the_model_are_skipped(unfit_config, raymm, tmp_path, ray_cluster):
    code, text = raymm("train", unfit_config)
    assert code == 0
    history = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["skipped"] for row in history] == [1, 1]
    assert "row-2" in text and "2.png" in text and "(1, 3, 12, 12)" in text
    assert "row-5" in text and "accepted: up to 40, the language model's max_position" in text


def test_a_sample_that_does_not_fit_is_named(unfit_config):
    """Check also a copy of the check in another process, which has no weights."""
    config = load_config(unfit_config, ["data.on_error=raise"])
    data = config.data
    check = cloudpickle.loads(cloudpickle.dumps(PartsCheck(build_model(config)).of_samples()))
    builder = StepBuilder(data, open_split(data, "train"), check)
    assert len(builder.build([0, 1, 3, 4]).microbatches) == 2
    with pytest.raises(SampleError, match=r"'row-2'.*column 'images', file .*2\.png: encoder"):
        builder.build([1, 2])
    with pytest.raises(SampleError, match=r"'row-5' .*longest row .* has 4\d tokens.*up to 40"):
        builder.build([5, 6])
