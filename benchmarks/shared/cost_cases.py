"""Modules of every kind that raymm accepts, each with inputs of two sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.modules.projector import Projector, ProjectorConfig
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.actors.weights.source import ConfigSource, FactorySource, ModuleSource

Inputs = dict[str, Any]
WIDTH = 64
SIZES = dict(
    hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4
)
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 320}
SAMPLES, VOCABULARY = 2, 320


@dataclass(frozen=True)
class Case:
    """Module with inputs of several sizes.

    Attributes:
        name: label of the result row.
        inputs: one entry per size; for a language model without embeddings and ids.
        causal: True for a language model.
        tokens: tokens per sample of a language model, one entry per size.
        whole: True for the language model of a vision-language model; inputs are microbatches.
    """

    name: str
    source: Callable[[], ModuleSource]
    inputs: tuple[Callable[[], Inputs], ...]
    causal: bool = False
    tokens: tuple[int, ...] = ()
    whole: bool = False


def _config(name: str, values: Mapping[str, Any]) -> Callable[[], ModuleSource]:
    def source() -> ModuleSource:
        model_class = getattr(transformers, name)
        return ConfigSource(model_class, model_class.config_class(**values), seed=1)

    return source


def _adapted(base: Callable[[], ModuleSource], lora: LoraConfig) -> Callable[[], ModuleSource]:
    return lambda: AdaptedSource.of(base(), lora, 1)


def _text(name: str, source: Callable[[], ModuleSource]) -> Case:
    return Case(name, source, (dict, dict), True, (48, 160))


def _pixels(size: int, count: int = SAMPLES) -> Inputs:
    return {"pixel_values": torch.randn(count, 3, size, size)}


def _patches(grids: list[tuple[int, int, int]], width: int) -> Inputs:
    """Return concatenated patches of images of different sizes."""
    count = sum(t * h * w for t, h, w in grids)
    return {"hidden_states": torch.randn(count, width), "grid_thw": torch.tensor(grids)}


def _sounds(frames: int) -> Inputs:
    return {"input_features": torch.randn(SAMPLES, 80, frames)}


def _language_models() -> list[Case]:
    experts = dict(num_experts_per_tok=2, moe_intermediate_size=48, num_experts=8)
    latent = dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, q_lora_rank=32,
        first_k_dense_replace=1, n_group=1, topk_group=1, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    )
    windows = dict(
        head_dim=16, sliding_window=16, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    )
    llama = _config("LlamaForCausalLM", TEXT)
    tied = _config("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True})
    gpt2 = dict(n_embd=WIDTH, n_layer=3, n_head=4, vocab_size=VOCABULARY, resid_pdrop=0.0)
    return [
        _text("dense, grouped queries", llama),
        _text("dense, tied embeddings", tied),
        _text("dense, biases", _config("Qwen2ForCausalLM", TEXT)),
        _text("dense, norms of heads", _config("Qwen3ForCausalLM", {**TEXT, "head_dim": 16})),
        _text("dense, wide heads", _config("LlamaForCausalLM", {**TEXT, "head_dim": 32})),
        _text("windows", _config("Gemma3ForCausalLM", {**TEXT, **windows})),
        _text("transposed weights", _config("GPT2LMHeadModel", gpt2)),
        _text("experts", _config("MixtralForCausalLM", {**TEXT, "num_local_experts": 4})),
        _text("experts, norms of heads", _config(
            "Qwen3MoeForCausalLM", {**TEXT, **experts, "head_dim": 16}
        )),
        _text("experts, a shared one", _config(
            "Qwen2MoeForCausalLM",
            {**TEXT, **experts, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
        )),
        _text("latent attention", _config(
            "DeepseekV3ForCausalLM", {**TEXT, **latent, "num_key_value_heads": 4}
        )),
        *_mixers(),
        _text("adapters", _adapted(llama, LoraConfig(r=4))),
        _text("adapters of queries", _adapted(llama, LoraConfig(r=4, targets=("q_proj",)))),
        _text("adapters with norms", _adapted(llama, LoraConfig(r=4, dora=True))),
    ]


def _mixers() -> list[Case]:
    """Return language models whose layers mix tokens by other means than attention."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    linear = dict(
        **experts, head_dim=16, layer_types=["linear_attention"] * 2 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, shared_expert_intermediate_size=48,
    )
    decays = dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=16, block_size=32,
        layer_types=["linear_attention"] * 2 + ["full_attention"],
    )
    beside = dict(
        head_dim=16, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=16, mamba_chunk_size=32,
    )
    states = dict(hidden_size=WIDTH, num_hidden_layers=3, vocab_size=VOCABULARY)
    mixed = dict(attn_layer_period=3, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1)
    return [
        _text("state space", _config("MambaForCausalLM", {**states, "state_size": 8})),
        _text("state space, chunks", _config("Mamba2ForCausalLM", {
            **states, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
            "chunk_size": 32,
        })),
        _text("state space and attention", _config(
            "JambaForCausalLM", {**TEXT, **mixed, "mamba_d_state": 8}
        )),
        _text("linear attention", _config("Qwen3NextForCausalLM", {**TEXT, **linear})),
        _text("linear attention, decays", _config("MiniMaxForCausalLM", {**TEXT, **decays})),
        _text("state space beside attention", _config("FalconH1ForCausalLM", {**TEXT, **beside})),
    ]


def cross_attention() -> Case:
    """Return a language model in which some layers attend to image features."""
    text = dict(TEXT, cross_attention_layers=[1], pad_token_id=0)
    vision = dict(
        hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=2, num_global_layers=1,
        attention_heads=4, image_size=16, patch_size=4, vision_output_dim=2 * WIDTH,
        intermediate_layers_indices=[0], max_num_tiles=2,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    values = dict(text_config=text, vision_config=vision, image_token_index=VOCABULARY)

    def microbatch(tokens: int) -> Inputs:
        mask = torch.ones(SAMPLES, tokens, 1, 2, dtype=torch.int64)
        return {
            "input_ids": torch.arange(SAMPLES * tokens).reshape(SAMPLES, tokens) % VOCABULARY,
            "attention_mask": torch.ones(SAMPLES, tokens, dtype=torch.int64),
            "pixel_values": torch.randn(SAMPLES, 1, 2, 3, 16, 16),
            "aspect_ratio_ids": torch.full((SAMPLES, 1), 2),
            "aspect_ratio_mask": torch.ones(SAMPLES, 1, 2, dtype=torch.int64),
            "cross_attention_mask": mask,
            "labels": torch.zeros(SAMPLES, tokens, dtype=torch.int64),
        }

    return Case(
        "cross attention", _config("MllamaForConditionalGeneration", values),
        tuple(partial(microbatch, tokens) for tokens in (24, 80)), True, whole=True,
    )


def _encoders() -> list[Case]:
    image = dict(image_size=32, patch_size=4)
    pixels = tuple(partial(_pixels, 32, count) for count in (1, 3))

    def images(name: str, model: str, values: Mapping[str, Any]) -> Case:
        return Case(name, _config(model, values), pixels)

    whisper = dict(
        d_model=WIDTH, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=160,
        max_source_positions=100,
    )
    wav2vec2 = dict(
        **SIZES, conv_dim=(32,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )
    return [
        images("vision transformer", "SiglipVisionModel", {**SIZES, **image}),
        images("vision transformer, class token", "CLIPVisionModel", {**SIZES, **image}),
        images("vision transformer, layer scale", "Dinov2Model", {
            "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, **image,
        }),
        images("windows that merge", "SwinModel", {
            "image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [1, 1],
            "num_heads": [2, 4], "window_size": 4,
        }),
        images("convolutions", "ConvNextModel", {
            "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 2,
        }),
        Case("sounds", lambda: _whisper(whisper), (partial(_sounds, 200), partial(_sounds, 200))),
        Case("waves", _config("Wav2Vec2Model", wav2vec2), tuple(
            partial(lambda n: {"input_values": torch.randn(SAMPLES, n)}, n) for n in (8000, 16000)
        )),
        Case("text", _config("BertModel", {**SIZES, "vocab_size": VOCABULARY}), tuple(
            partial(lambda n: {"inputs_embeds": torch.randn(SAMPLES, n, WIDTH)}, n)
            for n in (48, 160)
        )),
    ]


def _whisper(values: Mapping[str, Any]) -> ModuleSource:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return ConfigSource(WhisperEncoder, transformers.WhisperConfig(**values), seed=1)


def _native() -> list[Case]:
    """Return vision towers that take images at their native sizes."""
    few, many = [(1, 8, 12)], [(1, 8, 12), (1, 16, 16), (2, 4, 8)]
    two = dict(
        depth=4, hidden_size=96, embed_dim=WIDTH, num_heads=4, patch_size=4, mlp_ratio=2,
        temporal_patch_size=2,
    )
    windows = dict(
        depth=4, hidden_size=WIDTH, intermediate_size=160, num_heads=4, patch_size=4,
        window_size=32, fullatt_block_indexes=[1, 3], out_hidden_size=96, temporal_patch_size=2,
    )
    deep = dict(
        depth=4, hidden_size=WIDTH, intermediate_size=160, num_heads=4, patch_size=4,
        out_hidden_size=96, temporal_patch_size=2, deepstack_visual_indexes=[1],
        num_position_embeddings=64,
    )
    width = 3 * 2 * 4 * 4
    return [
        Case(name, partial(_tower, module, kind, values), tuple(
            partial(_patches, grids, width) for grids in (few, many)
        ))
        for name, module, kind, values in (
            ("native sizes", "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", two),
            ("native sizes, windows", "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel",
             windows),
            ("native sizes, features of layers", "qwen3_vl", "Qwen3VLVisionModel", deep),
        )
    ]


def _tower(module: str, kind: str, values: Mapping[str, Any]) -> ModuleSource:
    import importlib

    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    model_class = getattr(models, kind)
    return ConfigSource(model_class, model_class.config_class(**values), seed=1)


def _projectors() -> list[Case]:
    def features(tokens: int) -> Inputs:
        return {"features": torch.randn(SAMPLES, tokens, WIDTH)}

    return [
        Case(f"projector, {kind}", partial(_projector, kind), tuple(
            partial(features, tokens) for tokens in (16, 64)
        ))
        for kind in ("linear", "mlp")
    ]


def _projector(kind: str) -> ModuleSource:
    return ConfigSource(Projector, ProjectorConfig(kind, WIDTH, 96), seed=1)


def _plain() -> Case:
    def source() -> ModuleSource:
        return FactorySource("benchmarks.shared.cost_cases:Convolutions", {}, seed=1)

    return Case("a module of one's own", source, tuple(
        partial(_pixels, size) for size in (16, 32)
    ))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Flatten(2),
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return super().forward(pixel_values)


def cases() -> list[Case]:
    """Return all cases."""
    return [
        *_language_models(), cross_attention(), *_encoders(), *_native(), *_projectors(), _plain()
    ]
