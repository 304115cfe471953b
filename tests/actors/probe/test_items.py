"""Encoders whose items can be split over processes by tokens, and rejected encoders."""

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from raymm.actors.probe.items import probe_shared_items
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import ProbeError
from tests.actors.sharding.test_shared_items import CONFIGS, items, vit
from tests.support import parity_models as pm


class Attention(nn.Module):
    is_causal = False

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, lambda *_, **__: None
        )
        return attend(self, query, key, value, None)[0].flatten(2)


class TinyConfig(hf.PretrainedConfig):
    def __init__(self, mix: str = "", num_hidden_layers: int = 2, **rest) -> None:
        super().__init__(**rest)
        self.mix, self.num_hidden_layers = mix, num_hidden_layers


class TinyBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.attention, self.mix = Attention(config), config.mix
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8) if self.mix == "norm" else nn.Identity()

    def forward(self, hidden_states):
        hidden = hidden_states + self.attention(hidden_states)
        if self.mix == "convolution":
            return hidden + self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        if self.mix == "mean":  # independent of the order of tokens
            return hidden + hidden.mean(dim=1, keepdim=True)
        return hidden


class TinyEncoder(hf.PreTrainedModel):
    """Encoder whose blocks mix tokens by attention and, on request, otherwise."""

    config_class = TinyConfig
    _supports_sdpa = True

    def __init__(self, config) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(TinyBlock(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, x):
        for _ in range(2 if self.config.mix == "twice" else 1):
            for block in self.blocks:
                hidden = x = block(x)
        return hidden


TINY = {"x": torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(5))}


def test_probe_accepts_working_encoders():
    for name in ("siglip", "clip", "vit", "whisper", "pixtral"):
        probe_shared_items(LiveSource.of(pm.build(CONFIGS[name]())), items(name))
    probe_shared_items(ConfigSource(TinyEncoder, TinyConfig()), TINY)


@pytest.mark.parametrize(
    ("mix", "why"),
    [
        ("convolution", "something besides attention mixes tokens"),
        ("mean", "something besides attention mixes tokens"),
        ("norm", "a BatchNorm1d in its blocks mixes tokens in training"),
        ("twice", "runs its first block more than once"),
    ],
)
def test_probe_refuses_blocks_that_mix_tokens(mix, why):
    with pytest.raises(ProbeError, match=f"TinyEncoder cannot have cp above 1: .*{why}"):
        probe_shared_items(ConfigSource(TinyEncoder, TinyConfig(mix), frozen=False), TINY)


def test_probe_refuses_by_name():
    def refused(config_or_module, why, inputs=None, model_class=None):
        source = (
            LiveSource.of(config_or_module)
            if model_class is None
            else ConfigSource(model_class, config_or_module, frozen=False)
        )
        name = type(source.skeleton()).__name__
        with pytest.raises(ProbeError, match=f"^{name} cannot have cp above 1: .*{why}"):
            probe_shared_items(source, inputs)

    refused(nn.Sequential(nn.Conv2d(3, 4, 8)), "no list of blocks", pm.images(1))
    refused(pm.PlainCNN(), "does not take its attention from", pm.images(1))
    small = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    # Rotary tables for patches only, in a sequence with other tokens.
    rotary = hf.DINOv3ViTConfig(**small, image_size=32, patch_size=8)
    refused(rotary, "does not run on a part of its tokens", None, hf.DINOv3ViTModel)
    refused(vit(attention_probs_dropout_prob=0.1), "attention dropout", None, hf.ViTModel)
    refused(vit(output_hidden_states=True), "hidden states of all its blocks", None, hf.ViTModel)
    speech = hf.Wav2Vec2Config(**small, num_conv_pos_embedding_groups=2, layerdrop=0.1)
    refused(speech, "leaves out layers at random in training", None, hf.Wav2Vec2Model)
    windows = hf.Swinv2Config(image_size=32, embed_dim=8, depths=[1, 1], num_heads=[1, 1])
    refused(windows, "does not take its attention from", None, hf.Swinv2Model)
