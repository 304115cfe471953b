"""Parameters of each process of a tensor parallel group, and rejected modules."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from raymm.actors.sharding.tensor_plan import plan_module, tensor_plan
from raymm.actors.sharding.tensor_shard import shard_module
from raymm.actors.weights.source import LiveSource
from raymm.errors import PlanError
from tests.support.shard_models import mixtral, module_of, pm


def test_ownership_of_shards() -> None:
    plan = tensor_plan(LiveSource.of(module_of(pm.llama())), 4, "llm")
    key, query = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "kq")
    assert [plan.shard(key, r).ranges for r in range(4)] == [((0, 8),)] * 2 + [((8, 16),)] * 2
    assert [plan.sharers(key, r) for r in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [plan.is_replica(key, r) for r in range(4)] == [False, True, False, True]
    assert plan.shard(query, 3).ranges == ((24, 32),) and plan.sharers(query, 3) == (3,)
    assert [plan.vocabulary(r) for r in range(4)] == [(0, 25), (25, 49), (49, 73), (73, 97)]
    assert plan.shard("lm_head.weight", 1) == plan.shard("model.embed_tokens.weight", 1)
    norm = "model.norm.weight"
    assert plan.shard(norm, 2) is None and plan.sharers(norm, 2) == (2,)
    assert [plan.is_replica(norm, r) for r in range(4)] == [False, True, True, True]
    plan = tensor_plan(LiveSource.of(module_of(pm.qwen3())), 2, "llm")
    assert plan.sharers("model.layers.1.self_attn.q_norm.weight", 1) == (0, 1)
    plan = tensor_plan(LiveSource.of(module_of(mixtral())), 2, "llm")
    fused = plan.shard("model.layers.0.mlp.experts.gate_up_proj", 1)
    assert fused.dim == 1 and fused.ranges == ((24, 48), (72, 96))
    assert tensor_plan(LiveSource.of(pm.make_cnn()), 2, "vision").styles == {}


@pytest.mark.parametrize(
    ("config", "tp", "why"),
    [
        (pm.llama(), 3, "tp of 'llm' is 3, but .* has 4 query heads .* accepted: divisors of 4"),
        (hf.LlamaConfig(hidden_size=96, intermediate_size=48, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=12, num_key_value_heads=3), 4, None),
        (hf.LlamaConfig(hidden_size=96, intermediate_size=48, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=12, num_key_value_heads=3), 2,
         "3 KV heads .* neither divides the other; accepted: 1, 3, 6, 12"),
        (hf.LlamaConfig(hidden_size=32, intermediate_size=49, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=4), 2, "49 inner features at .*mlp.* divisors of 49"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: Any, tp: int, why: str | None) -> None:
    source = LiveSource.of(hf.LlamaForCausalLM(config))
    with pytest.raises(PlanError, match=why or "3 KV heads"):
        tensor_plan(source, tp, "llm")


def test_a_style_that_is_not_supported_is_refused_by_name() -> None:
    model = module_of(pm.llama())
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp": "sequence_parallel"}
    with pytest.raises(PlanError, match=r"'model\.layers\.0\.mlp' has the style 'sequence_par"):
        plan_module(model, 2, "llm")


def test_groups_of_another_size_are_refused() -> None:
    class Three:
        rank, size = 0, 3

    model = module_of(pm.llama())
    with pytest.raises(ValueError, match="the group has 3 processes, the plan 2"):
        shard_module(model, plan_module(model, 2, "llm"), Three())
