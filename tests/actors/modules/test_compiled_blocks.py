"""Compiled blocks: one graph, the numbers of uncompiled blocks, and few compilations."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters

from raymm.actors.modules import compiled_blocks
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.compiled_blocks import compile_blocks
from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.errors import ModelError
from raymm.kernels.hf import self_attention
from raymm.kernels.mask import patterns
from raymm.scheduler.costs.recomputation import ALL

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
}  # fmt: skip
LLAMA = hf.LlamaConfig(**SIZES)
GEMMA2 = hf.Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    compiled_blocks._compiled.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()


def decoder(config) -> nn.Module:
    torch.manual_seed(0)
    self_attention.register()
    model = hf.AutoModel.from_config(config, attn_implementation=self_attention.NAME)
    for parameter in model.parameters():  # norms with other weights than ones
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.train()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    path = find_blocks(model)
    assert path is not None
    return list(block_list(model, path))


def outcome(model, lengths, autocast=None, seed=0):
    """Run rows of documents; return the output and all gradients."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(2, total, 32, generator=generator, requires_grad=True)
    masks = patterns.documents(lengths), patterns.causal(total)
    model.zero_grad()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = model(inputs_embeds=embeds, raymm_mask=masks, use_cache=False).last_hidden_state
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def largest_error(found, expected):
    assert len(found) == len(expected) > 10
    return max(
        float((a - b).norm() / b.norm().clamp_min(1e-30))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("config, kinds", [(LLAMA, 1), (GEMMA2, 2)])
def test_one_graph_and_the_same_gradients(config, kinds):
    """Count graphs: one per kind of layer (with and without a window), whatever the lengths and
    masks. Without a graph break, because those would raise."""
    plain = decoder(config)
    compiled = copy.deepcopy(plain)
    compile_blocks(blocks_of(compiled), "llm", backend="aot_eager")
    rows = [[5, 9], [30], [2, 2, 2, 2], [64], [7, 1], [2], [31, 33]]
    for seed, lengths in enumerate(rows):
        found, expected = (outcome(model, lengths, seed=seed) for model in (compiled, plain))
        assert largest_error(found, expected) < 1e-5, lengths
    assert counters["stats"]["unique_graphs"] == kinds
    assert not counters["graph_break"]


def test_inductor_in_bf16_and_under_recomputation():
    """Compare bf16 with bf16: fused operators round once where separate ones round each time."""
    plain = decoder(LLAMA)
    compiled = copy.deepcopy(plain)
    compile_blocks(blocks_of(compiled), "llm")
    recompute_layers(blocks_of(compiled)[:2], [ALL, ALL])
    exact = outcome(plain, [5, 9])
    assert largest_error(outcome(compiled, [5, 9]), exact) < 1e-5
    found, expected = (outcome(m, [5, 9], torch.bfloat16) for m in (compiled, plain))
    assert largest_error(found, expected) < 3e-2
    # Not farther from fp32 than uncompiled blocks, up to a quarter.
    assert largest_error(found, exact) < 1.25 * largest_error(expected, exact)


def test_generation_runs_uncompiled():
    model = decoder(LLAMA).eval()
    plain = copy.deepcopy(model)
    compile_blocks(blocks_of(model), "llm", backend="aot_eager")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        found, expected = (m(input_ids=ids, use_cache=True) for m in (model, plain))
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert counters["stats"]["unique_graphs"] == 0


class Branching(nn.Module):
    """Block whose forward reads a value."""

    def forward(self, hidden_states):
        return hidden_states * 2 if hidden_states.sum().item() > 0 else hidden_states


def test_blocks_that_are_not_one_graph_are_refused_by_name():
    block = Branching()
    compile_blocks([block], "vision", backend="aot_eager")
    with pytest.raises(ModelError, match="cannot compile 'vision': Branching.forward is not one"):
        block(torch.ones(3))
    block = Branching()
    block.forward = lambda hidden_states: hidden_states
    with pytest.raises(ModelError, match="'vision': the forward of its Branching was replaced"):
        compile_blocks([block], "vision")
