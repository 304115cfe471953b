"""Counted FLOPs equal torch's counter on real models, counted parameters the real ones."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dinov2Config,
    Dinov2Model,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from raymm.actors.modules.blocks import num_blocks
from raymm.actors.weights.source import on_meta
from raymm.costs.layer_count import LayerCount, count_layers
from raymm.costs.load import Load, default_tokens
from raymm.errors import PlanError

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 4}
GQA = {**SIZES, "num_key_value_heads": 2, "vocab_size": 300}
IMAGE = {"image_size": 32, "patch_size": 4}
WHISPER = WhisperConfig(
    d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=160,
    max_source_positions=100,
)
TEXT, PIXELS = (2, 48), (2, 3, 32, 32)
# Name: class, config, shape of the input, tokens per sample.
LANGUAGE_MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GQA)),
    "wide heads": (LlamaForCausalLM, LlamaConfig(**GQA, head_dim=32)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**GQA, num_local_experts=4)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**GQA, head_dim=16, num_experts=8, num_experts_per_tok=2,
                       moe_intermediate_size=48),
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=300)),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{**GQA, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48, first_k_dense_replace=1, n_group=1, topk_group=1,
            q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
            v_head_dim=16,
        ),
    ),
}
ENCODERS = {
    "siglip": (SiglipVisionModel, SiglipVisionConfig(**SIZES, **IMAGE), PIXELS, 64),
    "clip": (CLIPVisionModel, CLIPVisionConfig(**SIZES, **IMAGE), PIXELS, 65),
    "dinov2": (
        Dinov2Model, Dinov2Config(hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                                  **IMAGE), PIXELS, 65,
    ),
    "whisper": (WhisperEncoder, WHISPER, (2, 80, 200), 100),
    "wav2vec2": (
        Wav2Vec2Model,
        Wav2Vec2Config(**SIZES, conv_dim=(32,) * 7, num_conv_pos_embeddings=16,
                       num_conv_pos_embedding_groups=4), (2, 16000), 49,
    ),
}


def make(model_class, config) -> nn.Module:
    """Return a model with attention and experts as plain products, which torch's counter supports.
    """
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    return model


def measured_flops(model: nn.Module, inputs: dict) -> tuple[int, int]:
    """Return forward and backward FLOPs of a real run, as counted by torch."""
    with FlopCounterMode(display=False) as forward:
        output = model(**inputs)
    result = output.logits if hasattr(output, "logits") else output.last_hidden_state
    with FlopCounterMode(display=False) as backward:
        result.pow(2).sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_agree_with_torchs_counter(name):
    model = make(*LANGUAGE_MODELS[name])
    load = Load(*TEXT)
    forward, backward = measured_flops(
        model, {"input_ids": torch.randint(0, 300, TEXT), "use_cache": False}
    )
    layers = count_layers(on_meta(model), load, causal=True)
    assert len(layers) == num_blocks(model)
    products = sum(layer.matmul_flops for layer in layers)
    # Eager attention computes the masked half too, and its backward does not recompute scores.
    whole = 2 * load.tokens / (load.tokens + 1)
    attention = whole * sum(layer.attention_flops for layer in layers)
    assert products + attention == pytest.approx(forward, rel=1e-3)
    assert 2 * products + 2 * attention == pytest.approx(backward, rel=1e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_agree_with_torchs_counter(name):
    model_class, config, shape, tokens = ENCODERS[name]
    model = make(model_class, config)
    forward, backward = measured_flops(model, {model.main_input_name: torch.randn(shape)})
    layers = count_layers(on_meta(model), Load(2, tokens))
    assert len(layers) == num_blocks(model)
    total = sum(layer.matmul_flops + layer.attention_flops for layer in layers)
    assert total == pytest.approx(forward, rel=0.02)
    # Torch computes no gradient of the pixels or of an unused pooling head.
    assert 2 * total == pytest.approx(backward, rel=0.1)
    if name != "wav2vec2":
        assert default_tokens(model) == tokens


def test_bert_counts_its_nested_attention_once():
    model = make(BertModel, BertConfig(**SIZES, vocab_size=300))
    forward, _ = measured_flops(model, {"input_ids": torch.randint(0, 300, TEXT)})
    layers = count_layers(model, Load(*TEXT))
    total = sum(layer.matmul_flops + layer.attention_flops for layer in layers)
    assert total == pytest.approx(forward, rel=1e-3)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *ENCODERS])
def test_parameters_are_exact(name):
    model_class, config, *_ = {**LANGUAGE_MODELS, **ENCODERS}[name]
    model = make(model_class, config)
    layers = count_layers(model, Load(1, 16), name in LANGUAGE_MODELS)
    counted = sum(layer.parameters for layer in layers)
    exact = sum(p.numel() for p in model.parameters())
    tied = getattr(config, "tie_word_embeddings", False) and name in LANGUAGE_MODELS
    # A tied embedding is on the first and on the last stage.
    assert counted == exact + (model.get_input_embeddings().weight.numel() if tied else 0)


def test_outer_layers_count_with_the_first_and_last_block():
    model = make(LlamaForCausalLM, LlamaConfig(**{**GQA, "num_hidden_layers": 4}))
    first, middle, third, last = count_layers(model, Load(1, 16), causal=True)
    assert middle == third
    assert first.parameters - middle.parameters == 300 * 64
    assert last.parameters - middle.parameters == 300 * 64 + 64
    assert first.matmul_flops == middle.matmul_flops  # an embedding lookup is not a product
    assert last.matmul_flops - middle.matmul_flops == 2 * 16 * 300 * 64
    assert (first.output_elements, last.output_elements) == (16 * 64, 1)


def test_the_head_runs_on_labels_only():
    model = make(LlamaForCausalLM, LlamaConfig(**GQA))
    all_rows = count_layers(model, Load(1, 16), causal=True)[-1]
    labelled = count_layers(model, Load(1, 16, labels=4), causal=True)[-1]
    assert all_rows.matmul_flops - labelled.matmul_flops == 2 * 12 * 300 * 64


def test_a_sliding_window_sees_fewer_pairs():
    config = Gemma3TextConfig(
        **GQA, head_dim=16, sliding_window=8, layer_types=["sliding_attention"] * 2
        + ["full_attention"],
    )
    sliding, _, full = count_layers(make(Gemma3ForCausalLM, config), Load(1, 48), causal=True)
    brute = {
        window: sum(1 for q in range(48) for k in range(48) if q - window < k <= q)
        for window in (8, 48)
    }
    assert sliding.attention_flops == 4 * 64 * brute[8]
    assert full.attention_flops == 4 * 64 * brute[48]


def test_attention_stays_within_samples():
    model = make(CLIPVisionModel, CLIPVisionConfig(**SIZES, **IMAGE))
    (one, *_), (two, *_) = count_layers(model, Load(1, 65)), count_layers(model, Load(2, 65))
    assert two.attention_flops == 2 * one.attention_flops
    assert count_layers(model, Load(1, 130))[0].attention_flops == 4 * one.attention_flops


def test_experts_take_only_the_tokens_routed_to_them():
    def block(per_token: int) -> LayerCount:
        config = MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=per_token)
        return count_layers(make(MixtralForCausalLM, config), Load(1, 16), causal=True)[1]

    one_expert = 3 * 64 * 160
    assert block(2).matmul_flops - block(1).matmul_flops == 2 * 16 * one_expert
    assert block(2).expert_parameters == 4 * one_expert
    # Every token is sent to two experts, with a weight, and returned.
    assert block(2).exchange_elements == 16 * 2 * (2 * 64 + 1)
    assert block(2).parameters == block(1).parameters


def test_a_plain_module_without_config_is_counted_too():
    cnn = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
                        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Flatten(2))
    with FlopCounterMode(display=False) as counter:
        cnn(torch.randn(2, 3, 32, 32))
    layers = count_layers(cnn, Load(2, 64))
    assert sum(layer.matmul_flops for layer in layers) == counter.get_total_flops()
    with pytest.raises(PlanError, match="Sequential does not say how many tokens"):
        default_tokens(cnn)


@pytest.mark.parametrize(
    "values, message",
    [
        ((0, 5), "samples is 0"),
        ((1, 2.5), "tokens is 2.5"),
        ((1, 5, 6), "labels is 6, but there are only 5 tokens"),
        ((1, 5, -1), "labels is -1"),
    ],
)
def test_impossible_loads_are_refused(values, message):
    with pytest.raises(PlanError, match=message):
        Load(*values)
