"""Bytes that autograd saves equal those of runs with values and of runs of all blocks."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from benchmarks import cost_truth
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.actors.weights.source import ConfigSource, ModuleSource
from raymm.costs import forward_run
from raymm.costs.load import Load
from raymm.costs.observed_load import observe
from raymm.costs.workload import encoder_load
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
LLAMA = ConfigSource(LlamaForCausalLM, LlamaConfig(**SIZES), seed=1)
WINDOWS = ConfigSource(Gemma3ForCausalLM, Gemma3TextConfig(
    **SIZES, head_dim=16, sliding_window=16,
    layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
))
SOURCES: dict[str, ModuleSource] = {
    "llama": LLAMA,
    "windows": WINDOWS,
    "gpt2": ConfigSource(GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=3, n_head=4,
                                                     vocab_size=320)),
    "experts": ConfigSource(MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
    "dora": AdaptedSource.of(LLAMA, LoraConfig(r=4, dora=True), 1),
}
SIGLIP = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=32, patch_size=8,
)


@pytest.mark.parametrize("name", SOURCES)
def test_saved_bytes_equal_a_real_run(name: str) -> None:
    model = SOURCES[name].build().eval()
    inputs = {"inputs_embeds": torch.randn(3, 40, 64)}
    measured, _ = cost_truth._bytes(model, inputs, True)
    skeleton = SOURCES[name].new_skeleton().eval()
    counted = forward_run.forward_run(skeleton, Load(3, 40), "fp32", causal=True)
    assert counted is not None
    assert sum(counted.layers) == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("source", [LLAMA, WINDOWS])
def test_few_blocks_predict_saved_bytes_of_all(source: ModuleSource) -> None:
    seen = []
    for few in (True, False):
        model = source.new_skeleton().eval()
        embeddings = torch.empty(2, 40, 64, device="meta")
        seen += observe(model, {"inputs_embeds": embeddings}, model, masks=False, few=few)
    few, full = seen
    assert few.output is not None
    assert few.kept == full.kept


def test_bytes_of_long_samples_follow_from_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, load = LLAMA.skeleton(), Load(3, 200, labels=150)
    direct = forward_run.forward_run(skeleton, load, "bf16", causal=True)
    monkeypatch.setattr(forward_run, "MOST_TOKENS", 64)
    extended = forward_run.forward_run(skeleton, load, "bf16", causal=True)
    assert direct is not None and extended is not None
    assert extended.layers == pytest.approx(direct.layers, rel=1e-6)


def test_an_encoder_and_its_projector_have_their_own_bytes() -> None:
    model = MultimodalModule({"vision": ModalityModule(SIGLIP, "mlp")}, LlamaConfig(**SIZES))
    items = {"pixel_values": torch.randn(3, 3, 32, 32), "sample_index": torch.arange(3)}
    load = encoder_load(model, "vision", items, 3)
    assert load is not None
    alone = SiglipVisionModel(SIGLIP)
    measured, _ = cost_truth._bytes(alone, {"pixel_values": items["pixel_values"]}, False)
    encoder = forward_run.forward_run(alone, load, "fp32")
    assert encoder is not None
    # The projector reads the last hidden state, not the pooled output that the measured run sums.
    assert sum(encoder.layers) == pytest.approx(measured, rel=0.1)
    projector = forward_run.forward_run(torch.nn.Identity(), load.of_projector(), "fp32")
    assert projector is not None
    # Input and output of its activation function; its own input is saved by the encoder's head.
    assert sum(projector.layers) == 3 * 16 * 4 * (64 + 64)
