"""Bytes of analytic profiles equal those of real layers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from raymm.actors.modules.merge import Prepend
from raymm.actors.rank.module_profiler import ModuleProfiler, ProfileRequest
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_layers
from raymm.costs.load import Load

LLAMA = LlamaConfig(
    hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1024, tie_word_embeddings=False,
)
SIGLIP = SiglipVisionConfig(
    hidden_size=96, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
    image_size=96, patch_size=8, vision_use_head=False,
)
ROWS, TOKENS = 2, 256


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_language_model(dtype: str) -> None:
    source = ConfigSource(LlamaForCausalLM, LLAMA)
    ids = torch.randint(1024, (ROWS, TOKENS))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    measured = ModuleProfiler(
        lambda: LanguageStage.build(LanguageSpec("llm", source, 3, Prepend()), 0, 3),
        "cpu", "bfloat16" if dtype == "bf16" else None, False, 1,
    ).measure(ProfileRequest(inputs, {}), repeats=1).layers
    load = Load(ROWS, TOKENS, ROWS * (TOKENS - 1))
    analytic = analytic_layers(source.skeleton(), load, "H100", dtype, causal=True)
    for layer, expected in zip(measured, analytic, strict=True):
        assert expected.activation_bytes == pytest.approx(float(layer.activation_bytes), rel=0.06)
        assert expected.working_bytes == pytest.approx(float(layer.working_bytes), rel=0.06)
        assert expected.forward_bytes == pytest.approx(float(layer.forward_bytes), rel=0.15)
    assert analytic[0].data_bytes == measured[0].data_bytes == 3 * 8 * ROWS * TOKENS


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_encoder(dtype: str) -> None:
    source = ConfigSource(SiglipVisionModel, SIGLIP)
    inputs = {"pixel_values": torch.randn(ROWS, 3, 96, 96), "sample_index": torch.arange(ROWS)}
    measured = ModuleProfiler(
        lambda: EncoderStage.build(EncoderSpec("vision", source, 3, None), 0, 3),
        "cpu", "bfloat16" if dtype == "bf16" else None, False, 1,
    ).measure(ProfileRequest(inputs, {}), repeats=1).layers
    analytic = analytic_layers(source.skeleton(), Load(ROWS, 144), "H100", dtype)
    # The first layer includes pixels, which are data; under autocast, their cast is saved instead.
    kept = [layer.activation_bytes for layer in analytic]
    kept[0] -= inputs["pixel_values"].nbytes if dtype == "fp32" else 0
    for layer, expected, activations in zip(measured, analytic, kept, strict=True):
        assert activations == pytest.approx(float(layer.activation_bytes), rel=0.01)
        assert expected.working_bytes > 0.8 * layer.working_bytes
        assert expected.forward_bytes == pytest.approx(float(layer.forward_bytes), rel=0.2)
    # The gradient of the last one's output already exists.
    for layer, expected in zip(measured[:-1], analytic[:-1], strict=True):
        assert expected.working_bytes == pytest.approx(float(layer.working_bytes), rel=0.2)
    assert analytic[0].data_bytes == inputs["pixel_values"].nbytes
