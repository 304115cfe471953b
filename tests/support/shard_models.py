"""Models to shard: small configurations with odd sizes, and their modules."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from raymm.actors.modules.projector import Projector, ProjectorConfig
from tests.support import parity_models as pm


def with_kv_heads(count: int) -> hf.LlamaConfig:
    config = pm.llama()
    config.num_key_value_heads = count
    return config


def qwen3_one_kv_head() -> hf.Qwen3Config:
    config = pm.qwen3()
    config.num_key_value_heads = 1
    return config


def gemma2() -> hf.Gemma2Config:
    return hf.Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=pm.V, sliding_window=4,
        final_logit_softcapping=2.0, attn_implementation="eager",
    )


def phi3() -> hf.Phi3Config:
    return hf.Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, pad_token_id=0, resid_pdrop=0.0,
    )


def glm4() -> hf.Glm4Config:
    """Return a configuration with fused gate and up projections."""
    return hf.Glm4Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=pm.V, pad_token_id=0,
    )


def neox() -> hf.GPTNeoXConfig:
    """Return a configuration with fused query, key and value per head.

    Attention and feed-forward are parallel.
    """
    return hf.GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=pm.V, attention_dropout=0.0, hidden_dropout=0.0,
    )


def mixtral() -> hf.MixtralConfig:
    return hf.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, num_local_experts=4,
    )


def aria() -> hf.AriaTextConfig:
    """Return a configuration with transposed expert matrices, and shared experts."""
    return hf.AriaTextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, moe_num_experts=4, moe_topk=2,
        moe_num_shared_experts=1, pad_token_id=0,
    )


def deepseek_v3() -> hf.DeepseekV3Config:
    """Return a configuration with latent attention, whose plan excludes attention."""
    return hf.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=12,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, vocab_size=pm.V,
    )


def deepseek_v2() -> hf.DeepseekV2Config:
    """Return a configuration with sharded latent attention and a rotary part for all heads."""
    return hf.DeepseekV2Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=12,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, vocab_size=pm.V, head_dim=8,
    )


def vit() -> hf.ViTConfig:
    return hf.ViTConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=pm.IMAGE_SIZE, patch_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def projector() -> ProjectorConfig:
    return ProjectorConfig("mlp", 12, 8)


LANGUAGE = {
    "llama": pm.llama,
    "llama_untied": lambda: pm.llama(tied=False),
    "llama_one_kv_head": lambda: with_kv_heads(1),
    "qwen3": pm.qwen3,
    "qwen3_one_kv_head": qwen3_one_kv_head,
    "gemma3": pm.gemma3,
    "gemma2": gemma2,
    "gpt2": pm.gpt2,
    "opt": pm.opt,
    "phi3": phi3,
    "phi3_gathered": phi3,
    "glm4": glm4,
    "neox": neox,
    "mixtral": mixtral,
    "aria": aria,
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": deepseek_v2,
}
FUSED = ("gpt2", "phi3", "glm4", "neox")
ENCODERS = {"siglip": pm.siglip, "clip": pm.clip, "whisper": pm.whisper, "vit": vit}
CLASSES = {
    hf.Gemma2Config: hf.Gemma2ForCausalLM, hf.Glm4Config: hf.Glm4ForCausalLM,
    hf.GPTNeoXConfig: hf.GPTNeoXForCausalLM, hf.Phi3Config: hf.Phi3ForCausalLM,
    hf.MixtralConfig: hf.MixtralForCausalLM, hf.AriaTextConfig: hf.AriaTextForCausalLM,
    hf.DeepseekV3Config: hf.DeepseekV3ForCausalLM, hf.DeepseekV2Config: hf.DeepseekV2ForCausalLM,
    hf.ViTConfig: hf.ViTModel, ProjectorConfig: Projector,
}


def module_of(config: Any) -> nn.Module:
    """Build a module with random weights, none of them a special case."""
    if type(config) in pm.MODEL_CLASSES:
        return pm.build(config, 3)
    torch.manual_seed(3)
    model = CLASSES[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
