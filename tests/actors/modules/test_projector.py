"""Projectors between an encoder and the language model."""

import pytest
import torch

from raymm.actors.modules.projector import Projector, ProjectorConfig


@pytest.mark.parametrize(("kind", "layers"), [("linear", 1), ("mlp", 2)])
def test_an_exported_projector_is_read_by_transformers(kind, layers, tmp_path):
    projector = Projector(ProjectorConfig(kind, 3, 5))
    features = torch.randn(2, 4, 3)
    assert projector(features).shape == (2, 4, 5)
    assert len(list(projector.parameters())) == 2 * layers
    assert all(not layer.bias.any() for layer in projector.layers if hasattr(layer, "bias"))
    projector.save_pretrained(tmp_path)
    again = Projector.from_pretrained(tmp_path)
    assert torch.equal(again(features), projector(features))


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="projector is 'conv'; accepted: linear, mlp"):
        Projector(ProjectorConfig("conv"))
