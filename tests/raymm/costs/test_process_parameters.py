"""Planned parameters of a tensor-parallel process equal its shards of a real model."""

from __future__ import annotations

import pytest
import transformers
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SiglipVisionConfig,
)

from raymm.actors.sharding.tensor_plan import tensor_plan
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_layers
from raymm.costs.load import Load
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleNode
from raymm.scheduler.plan.stage import Degrees
from raymm.scheduler.schedule.process_costs import process_layers, stage_layers


def tiny_configs():
    """Return language models without experts, with few, and with mostly experts."""
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )
    experts = dict(num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    return {
        "LlamaForCausalLM": LlamaConfig(**sizes),
        "MixtralForCausalLM": MixtralConfig(**sizes, num_local_experts=4),
        "Qwen3MoeForCausalLM": Qwen3MoeConfig(**sizes, **experts, num_experts=32),
        "Qwen2MoeForCausalLM": Qwen2MoeConfig(
            **sizes, **experts, num_experts=4, shared_expert_intermediate_size=32
        ),
        "Qwen2ForCausalLM": Qwen2Config(**{**sizes, "num_key_value_heads": 2}),
        "GPT2LMHeadModel": GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64),
    }


def tiny_encoders():
    """Return encoders with convolutions, position embeddings and biases."""
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        image_size=32, patch_size=8,
    )
    return {
        "SiglipVisionModel": SiglipVisionConfig(**sizes),
        "CLIPVisionModel": CLIPVisionConfig(**sizes),
    }


def pieces(name: str, tp: int) -> tuple[tuple[LayerCost, ...], dict[str, int]]:
    """Return costs of a process's layers, and bytes of its shards of a real model by parameter."""
    configs = tiny_configs() | tiny_encoders()
    source = ConfigSource(getattr(transformers, name), configs[name])
    skeleton = source.skeleton()
    causal = name in tiny_configs()
    layers = analytic_layers(skeleton, Load(1, 16), "cpu", "fp32", causal=causal)
    node = ModuleNode("llm", (True,) * 3)
    costs = process_layers(CostProfile({"llm": layers}), node, Degrees(1, tp))
    costs = stage_layers(costs, 0, 3)
    plan = tensor_plan(source, tp, "llm")
    held = {}
    for path, parameter in skeleton.named_parameters():
        shard = plan.shard(path, 0) if tp > 1 else None
        share = 1.0 if shard is None else shard.length / parameter.shape[shard.dim]
        held[path] = round(4 * parameter.numel() * share)
    return costs, held


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [n for n in tiny_configs() if "Moe" in n or "Mixtral" in n])
def test_experts_of_a_process(name: str, tp: int) -> None:
    costs, held = pieces(name, tp)
    of_experts = sum(size for path, size in held.items() if ".experts." in path)
    assert sum(cost.expert_bytes for cost in costs) == of_experts


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", tiny_configs() | tiny_encoders())
def test_all_parameters_of_a_process(name: str, tp: int) -> None:
    costs, held = pieces(name, tp)
    assert sum(cost.parameter_bytes for cost in costs) == sum(held.values())
