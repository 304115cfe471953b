"""Outputs that training would drop are rejected by name; unused ones are not."""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from raymm.actors.probe.outputs import check_outputs
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import NotRunError, ProbeError

SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
VIT = dict(**SMALL, image_size=32, patch_size=16)


def encoder(module, config=None, **callbacks) -> EncoderSpec:
    source = LiveSource.of(module) if config is None else ConfigSource(module, config)
    return EncoderSpec("vision", source, 2, **callbacks)


@pytest.mark.parametrize("module, config", [
    (hf.SiglipVisionModel, hf.SiglipVisionConfig(**VIT, output_hidden_states=True)),
    (hf.CLIPVisionModel, hf.CLIPVisionConfig(**VIT)),
    (hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig(**VIT)),
    (hf.ViTModel, hf.ViTConfig(**VIT)),
    (hf.Dinov2Model, hf.Dinov2Config(**VIT)),
    (hf.Wav2Vec2Model,
     hf.Wav2Vec2Config(**SMALL, conv_dim=(8,) * 7, num_conv_pos_embedding_groups=2)),
    (hf.ConvNextModel, hf.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2)),
])  # fmt: skip
def test_poolers_and_hidden_states_are_not_missed(module, config):
    assert check_outputs(encoder(module, config))


@pytest.mark.parametrize("around", [
    nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.device("meta"),
], ids=["nothing", "no grad", "inference mode", "default device"])  # fmt: skip
def test_features_with_own_parameters_need_a_callback(around):
    config = Qwen3VLVisionModel.config_class(
        depth=3, hidden_size=16, out_hidden_size=24, num_heads=2, intermediate_size=16,
        deepstack_visual_indexes=[0, 1],
    )
    with around():
        with pytest.raises(ProbeError, match=(
            r"Qwen3VLVisionModel, the encoder of 'vision', returns "
            r"pooler_output \(16, 24\) \(of merger.*deepstack_features\[0\].*callback"
        )):
            check_outputs(encoder(Qwen3VLVisionModel, config))
        check_outputs(encoder(Qwen3VLVisionModel, config, postprocess_module=_pooled))
        with pytest.raises(ProbeError, match="pooler_output"):  # returns its input
            check_outputs(encoder(Qwen3VLVisionModel, config, postprocess_module=_same))


def _pooled(inputs, output):
    return output.pooler_output


def _same(inputs, output):
    return output


class Features(nn.Module):
    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.body, self.more = nn.Linear(4, 4), nn.ModuleDict(more)

    def forward(self, x):
        hidden = self.body(x)
        return hidden, *(part(hidden) for part in self.more.values())


class Maps(Features):
    def forward(self, x):
        return {"maps": [self.body(x), x]}


class Total(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).square().sum()


class Mean(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).mean(dim=1)


def test_tuples_of_plain_modules_count_too():
    x = {"x": torch.randn(2, 3, 4)}
    check_outputs(encoder(Features()), x)
    check_outputs(encoder(Features(pool=Mean(4, 4))), x)
    with pytest.raises(ProbeError, match=r"returns 1 \(2, 3, 8\) \(of more.merger"):
        check_outputs(encoder(Features(merger=nn.Linear(4, 8))), x)
    with pytest.raises(ProbeError, match=r"returns 1 \(\) \(of more.codebook"):
        check_outputs(encoder(Features(codebook=Total(4, 4))), x)


def test_missing_output_tensors_are_reported():
    with pytest.raises(ProbeError, match=r"returns a dict \(maps\) without last_hid"):
        check_outputs(encoder(Maps()), {"x": torch.randn(2, 3, 4)})
    with pytest.raises(NotRunError):
        check_outputs(encoder(Features()), {"x": torch.randn(2, 3, 5)})
