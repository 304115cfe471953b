"""The list of blocks of a module."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from raymm.actors.modules.blocks import (
    block_list,
    config_depth_names,
    find_blocks,
    hidden_name,
    hidden_state,
    num_blocks,
)

SIZES = {
    "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3,
    "vocab_size": 16,
}


def linears(count, width=2):
    return [nn.Linear(width, width) for _ in range(count)]


@pytest.mark.parametrize(("model", "name"), [
    (LlamaForCausalLM(LlamaConfig(**SIZES)), "model.layers"),
    (BertModel(BertConfig(**SIZES)), "encoder.layer"),
])
def test_blocks_of_transformers_models_are_found(model, name):
    assert find_blocks(model) == name
    assert num_blocks(model) == len(block_list(model, name)) == 3
    assert config_depth_names(model.config) == ["num_hidden_layers"]


def test_the_list_of_the_configs_length_wins():
    model = nn.Module()
    model.large, model.small = nn.Sequential(*linears(3, 9)), nn.ModuleList(linears(2))
    assert find_blocks(model) == "large"  # more parameters
    model.config = SimpleNamespace(depth=2)
    assert find_blocks(model) == "small"


def test_a_module_without_a_numbered_list_has_one_block():
    named = nn.Sequential()
    named.add_module("first", nn.Linear(2, 2))
    named.add_module("second", nn.Linear(2, 2))
    model = nn.ModuleDict({"a": named, "b": nn.ModuleList(linears(1))})
    assert find_blocks(model) is None and num_blocks(model) == 1


def test_the_hidden_state_is_found_by_position_or_name():
    class Block(nn.Module):
        def forward(self, x, mask=None):
            return x

    hidden = torch.zeros(1)
    assert hidden_name(Block()) == "x"
    assert hidden_state(Block(), (), {"x": hidden, "mask": None}) is hidden
    assert hidden_state(Block(), (hidden,), {}) is hidden
    assert hidden_name(LlamaForCausalLM(LlamaConfig(**SIZES)).model.layers[0]) == "hidden_states"
