"""Decisions of a run about its data before anything starts."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.costs.workload import item_tokens
from raymm.data import EpochSampler, ItemTokens
from raymm.errors import DataError
from raymm.monitor.training_data import TrainingData, training_data
from tests.support.tiny_run import save_rows


@pytest.fixture
def run_of(make_config, tmp_path):
    """Return (data section, model) of a run with planned microbatches."""
    save_rows(tmp_path, "train", 24, seed=2)

    def make(changes=None):
        config = load_config(make_config({
            "data.train": str(tmp_path / "train.jsonl"),
            "data.batching": {"method": "balanced", "cache": str(tmp_path / "scans")},
            **(changes or {}),
        }))
        return config.data, build_model(config)

    return make


def test_items_count_as_encoder_tokens(run_of):
    """Count 8 x 8 pixels in patches of 4 as 4 tokens, which are prepended to the text.

    The planner gets sizes divided by their common factors.
    """
    data, model = run_of()
    output = StringIO()
    found = training_data(data, model, console=Console(file=output))
    assert found.tokens == {"vision": ItemTokens(4, 4)}
    assert "batching balanced: 24 samples, about 2 in each of 2 microbatches" in output.getvalue()
    images = found.dataset.counts["vision"]
    np.testing.assert_array_equal(found.sampler.sizes.values[:, 0], images)
    text = found.sampler.sizes.values[:, 1] - 4 * images
    assert found.sampler.sizes.names == ("vision", "text") and text.min() > 0


def test_placeholders_are_already_text_tokens(run_of):
    data, model = run_of({"model.merge": {"vision": "<image>"},
                          "data.modalities.vision.placeholder_tokens": 4})  # fmt: skip
    assert item_tokens(model, {}) == {"vision": ItemTokens(4, 0)}


def test_an_unusable_sample_does_not_stop_the_scan(run_of, tmp_path):
    data, model = run_of({"data.on_error": "skip"})
    (tmp_path / "train-1.png").write_bytes(b"no image")
    assert training_data(data, model).tokens == {"vision": ItemTokens(4, 4)}


def test_a_position_of_other_samples_is_refused(run_of, tmp_path):
    data, model = run_of()
    sampler = training_data(data, model).sampler
    _, state = next(sampler.batches())
    assert training_data(data, model, state).sampler.digest == sampler.digest
    save_rows(tmp_path, "train", 25, seed=2)
    with pytest.raises(DataError, match="does not fit these 25 samples"):
        training_data(data, model, state)


def test_random_steps_and_batches_in_memory_need_no_scan(run_of, monkeypatch):
    monkeypatch.setattr("raymm.data.sampling.batching.scan", None)
    data, model = run_of({"data.batching": "random"})
    found = training_data(data, model)
    assert isinstance(found.sampler, EpochSampler) and found.tokens == {}
    assert training_data([{}], model) == TrainingData()
