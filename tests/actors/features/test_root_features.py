"""Features of a tower's frozen part, cached per item.

The tower's output is bitwise the same for cached features as for the items, in any batch, and
equals the tower's joint output up to rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.shared.vlm_check import noisy
from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.features.kept_features import KEYS, FeatureWriter
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.tower import FeaturedTowerStage, TowerStage, featured_inputs
from raymm.data.loading.feature_lookup import TowerLookup
from tests.support.contained_projectors import frozen_tower

CONTEXT = MicrobatchContext(1)


def handed_over(stage, inputs):
    """Return the language model's input, and gradients of the tower's trained parameters."""
    stage.zero_grad()
    message = stage.run(dict(inputs), {}, CONTEXT)
    total = sum((tensor.float() ** 2).sum() for tensor in message.tensors)
    if total.requires_grad:
        total.backward()
    grads = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    return [t.detach() for t in message.tensors], dict(message.side), grads


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("Mistral3ForConditionalGeneration", 1),  # concatenated images of any size
        ("Qwen3VLForConditionalGeneration", 0),  # patches in one tensor; features of three layers
        ("Idefics3ForConditionalGeneration", 0),  # rows of images, padded with zeros
        ("VoxtralForConditionalGeneration", 0),
        ("LlavaForConditionalGeneration", 0),  # reads the output of the second to last block
    ],
)
def test_cached_features_replace_items(tmp_path, monkeypatch, name, dim):
    model, microbatches = frozen_tower(name)
    (tower,) = model.tower_names
    form = model.root_form(tower)
    assert form.dim == dim
    spec = model.tower_spec(tower)
    plain = noisy(TowerStage.build(spec, 0, spec.num_blocks))
    featured = replace(spec, root=form)
    stage = noisy(FeaturedTowerStage.build(featured, 0, spec.num_blocks))
    folder = FeatureFolder(tmp_path, 10**8)
    writer = FeatureWriter(folder)
    stage.keep_features(writer)
    lookup = TowerLookup({tower: folder}, {tower: form})
    for batch in microbatches:
        inputs = model.tower(tower).inputs(batch)
        if inputs is None:
            continue
        tensors, side, grads = handed_over(plain, inputs)
        keys = lookup.keys(tower, inputs)
        computed = handed_over(stage, {**inputs, KEYS: keys})
        for own, due in zip(computed[0], tensors, strict=True):
            assert (own - due).norm() <= 1e-5 * due.norm()
        assert computed[1].keys() == side.keys() and computed[2].keys() == grads.keys()
        for parameter, due in grads.items():
            assert (computed[2][parameter] - due).norm() <= 1e-5 * due.norm()
        writer.wait()
        features = lookup.features(tower, keys)
        assert features is not None
        monkeypatch.setattr(stage._root, "_forward", None)  # it must not run
        read = handed_over(stage, featured_inputs(tower, inputs, features))
        monkeypatch.undo()
        assert all(map(torch.equal, read[0], computed[0]))
        assert all(torch.equal(read[1][each], computed[1][each]) for each in side)
        assert all(torch.equal(read[2][each], computed[2][each]) for each in grads)


def test_a_damaged_file_counts_as_missing(tmp_path):
    model, microbatches = frozen_tower("LlavaForConditionalGeneration")
    form = model.root_form("vision")
    lookup = TowerLookup({"vision": FeatureFolder(tmp_path, 10**8)}, {"vision": form})
    keys = lookup.keys("vision", model.tower("vision").inputs(microbatches[0]))
    assert len(set(keys)) == len(keys) > 1
    assert lookup.features("vision", keys) is None
