"""Measurement of layers: what it accepts, and modules that fail."""

import pytest
import torch

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.costs.workload import full_microbatch
from raymm.errors import PlanError
from raymm.profiling.layers import LayerMeasurement, _requests
from tests.raymm.costs.test_step_flops import batch, described


def test_a_failing_module_is_named(make_config, ray_cluster):
    config = load_config(make_config())
    model = build_model(config)
    microbatch = full_microbatch(config.data, model.encoder_names)
    microbatch["vision"] = {**microbatch["vision"]}
    microbatch["vision"]["pixel_values"] = microbatch["vision"]["pixel_values"][:, :2]
    with pytest.raises(PlanError, match="profiling 'vision' failed: RuntimeError: "):
        LayerMeasurement(model, microbatch, repeats=1).run()


def test_a_microbatch_needs_items_for_every_encoder(make_config):
    config = load_config(make_config())
    model = build_model(config)
    found = full_microbatch(config.data, model.encoder_names)
    assert len(found["vision"]["sample_index"]) >= 1
    with pytest.raises(PlanError, match="the microbatch has no items for encoder 'vision'"):
        LayerMeasurement(model, {**found, "vision": {}}).run()


@pytest.mark.parametrize(("options", "expected"), [
    ({"repeats": 0}, "repeats is 0; it must be a whole number above 0"),
    ({"repeats": 1.5}, "repeats is 1.5"),
    ({"lengths": (1,)}, "lengths has 1; each must be a whole number above 1"),
    ({"lengths": (10**6,)}, "lengths has 1000000; the language model takes at most"),
])  # fmt: skip
def test_wrong_arguments_are_named_before_an_actor_starts(options, expected):
    with pytest.raises(PlanError, match=expected):
        LayerMeasurement(described(), batch([3], [0]), **options).run()


def test_lengths_add_half_and_twice_the_items_and_random_text():
    model, microbatch = described(), batch([6, 6], [0, 0, 1])
    microbatch["labels"][:, 3:] = -100
    plain = list(_requests("vision", model, microbatch, {}, ()))
    sized = list(_requests("vision", model, microbatch, {}, (8,)))
    assert [len(r.inputs["pixel_values"]) for r in plain] == [3]
    assert [len(r.inputs["pixel_values"]) for r in sized] == [3, 1, 6]
    shapes = {"vision": (3, 4, 48)}
    real, random = _requests("llm", model, microbatch, shapes, (11, 11))
    assert tuple(real.inputs["input_ids"].shape) == (2, 6) and not real.plain_text
    assert tuple(random.inputs["input_ids"].shape) == (2, 11) and random.plain_text
    # Two of five tokens of a row have a label, and so have four of ten.
    assert int((random.inputs["labels"][:, 1:] != -100).sum()) == 2 * 4
    assert torch.equal(random.inputs["attention_mask"], torch.ones(2, 11, dtype=torch.int64))
