"""Stages whose outputs are cached per item."""

import torch
from torch.testing import assert_close
from transformers import SiglipVisionConfig

from raymm.actors.features.kept_features import every_item
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.callbacks import Cuts, probe_chain
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.feature_stage import FeatureStage
from raymm.actors.stages.stage_inputs import (
    kept_entries,
)
from tests.support.frozen_first_blocks import PICTURES, model_of


def test_cached_first_blocks_give_the_full_features() -> None:
    """Compare bitwise, for items in any batch, and with the same gradients."""
    spec = model_of(SiglipVisionConfig(**PICTURES)).encoder_spec("vision")
    whole = EncoderStage.build(spec, 0, 5)
    cut = probe_chain(spec, Cuts(True, False))
    first, rest = FeatureStage.build(cut, 0, 2), EncoderStage.build(cut, 2, 5)
    torch.manual_seed(0)
    pixels, context = torch.randn(3, 3, 8, 8), MicrobatchContext(1)
    with torch.no_grad():
        message = first.run({"pixel_values": pixels}, {}, context)
        entries = [
            kept_entries(first.run(item, {}, context))
            for item in every_item({"pixel_values": pixels})
        ]
    kept = {name: torch.cat([own[name] for own in entries]) for name in entries[0]}
    assert torch.equal(kept["raymm_features"], message.tensors[0])
    output = rest.run(kept, {}, context).tensors[0]
    assert torch.equal(output, rest.run(None, {"vision": message}, context).tensors[0])
    expected = whole.run({"pixel_values": pixels}, {}, context).tensors[0]
    assert_close(output, expected)
    for result in (output, expected):
        result.square().sum().backward()
    gradients = dict(whole.named_parameters())
    trained = {name: p.grad for name, p in rest.named_parameters() if p.requires_grad}
    assert trained and not any(p.requires_grad for p in first.parameters())
    for name, gradient in trained.items():
        assert (gradient - gradients[name].grad).norm() <= 1e-5 * gradient.norm()
    # A sample check has no more than the cached values.
    assert whole.run(kept, {}, context).tensors[0].shape == expected.shape
