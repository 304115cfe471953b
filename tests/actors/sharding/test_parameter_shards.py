"""Parameter shards of each process."""

import pytest
import torch
import transformers as hf
from torch import nn

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.sharding.fully_sharded import block_units, fully_sharded_plan, language_units


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_shards_equal_torch_chunks(tied, n):
    """Replicate tied embeddings and the parameters around the blocks."""
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, tie_word_embeddings=tied,
    )
    module = hf.LlamaForCausalLM(config)
    plan = fully_sharded_plan(module, language_units(module, find_blocks(module)), n)
    embedding = next(
        name for name, p in module.named_parameters()
        if p is module.get_input_embeddings().weight
    )  # fmt: skip
    assert (embedding in plan.lengths) == (not tied)
    for name, parameter in module.named_parameters():
        if name not in plan.lengths:
            assert ".layers." not in name
            assert plan.shard(name, 0) is None and plan.sharers(name, 1) == tuple(range(n))
            assert [plan.is_replica(name, at) for at in range(n)] == [False] + [True] * (n - 1)
            continue
        chunks = list(parameter.chunk(n)) + [parameter[:0]] * (n - len(parameter.chunk(n)))
        for at, chunk in enumerate(chunks):
            shard = plan.shard(name, at)
            ((start, stop),) = shard.ranges
            assert shard.dim == 0 and torch.equal(parameter[start:stop], chunk)
            assert plan.sharers(name, at) == (at,) and not plan.is_replica(name, at)


def test_parameters_of_several_blocks_stay_whole():
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    module.layers[1].bias = module.layers[0].bias
    module.layers[0].scale = nn.Parameter(torch.tensor(1.0))
    plan = fully_sharded_plan(module, block_units(module, "layers"), 2)
    assert set(plan.lengths) == {"layers.0.weight", "layers.1.weight"}
