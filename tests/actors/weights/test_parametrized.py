"""Live modules with parametrized weights: the same uncut, cut, and sent."""

import pickle

import pytest
import torch
import transformers as hf
from ray import cloudpickle
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.callbacks import Cuts, probe_chain
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import ModelError


class Encoder(nn.Module):
    hidden_size = 8

    def __init__(self, normed) -> None:
        super().__init__()
        self.stem, self.head = normed(nn.Linear(8, 8)), normed(nn.Linear(8, 8))
        self.blocks = nn.ModuleList(normed(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)


def outcome(spec, bounds, inputs):
    """Return output and gradients of the chain in stages, each sent to its process."""
    message, stages = None, []
    for lo, hi in zip(bounds, bounds[1:], strict=False):
        sent = pickle.loads(cloudpickle.dumps(spec))
        stages.append(EncoderStage.build(sent, lo, hi).eval())
        received = {} if message is None else {"vision": message}
        message = stages[-1].run(None if lo else inputs, received, MicrobatchContext(1))
    message.tensors[0].square().sum().backward()
    return message.tensors[0], {n: p.grad for stage in stages for n, p in stage.named_parameters()}


@pytest.mark.parametrize("normed", [
    parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
    weight_norm, spectral_norm,
])  # fmt: skip
def test_a_parametrized_module_is_the_same_in_stages(normed):
    module, inputs = Encoder(normed).eval(), {"x": torch.randn(2, 3, 8)}
    spec = EncoderSpec("vision", LiveSource.of(module), 3)
    cut = probe_chain(spec, Cuts(True, False), inputs)
    expected, gradients = outcome(spec, (0, 3), inputs)
    assert torch.equal(expected, module(**inputs))
    output, found = outcome(cut, (0, 2, 3), inputs)
    assert torch.equal(output, expected)
    assert {f"module.{n}" for n, _ in module.named_parameters()} == set(found)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm()


def test_weight_norm_of_a_config_begins_with_numbers():
    config = hf.Wav2Vec2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        conv_dim=(8,) * 7, num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8,
    )
    source = ConfigSource(hf.Wav2Vec2Model, config)
    built = source.build()
    weight = built.encoder.pos_conv_embed.conv.weight
    assert torch.isfinite(weight).all() and weight.std() > 0
    assert torch.equal(weight, source.build().encoder.pos_conv_embed.conv.weight)


def test_an_attribute_that_is_never_recomputed_is_refused():
    module = Encoder(lambda layer: layer)
    module.doubled = module.stem.weight * 2
    with pytest.raises(ModelError, match="attribute 'doubled' of Encoder .* make it a parameter"):
        LiveSource.of(module)
