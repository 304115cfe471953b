"""Modules that are sharded together, by Hugging Face's plan or by names."""


import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import HIGH, LOW, adapt
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.sharding.tensor_rules import (
    ParameterShard,
    find_rules,
    generic,
    head_name,
    is_linear,
    leaf_name,
    parent_name,
    split,
    widths,
)
from raymm.errors import ModelError

HALVES = [((0, 32),), ((32, 64),)]


def adapted(layer, base=None):
    return adapt(nn.ModuleList([layer]), ["0"], LoraConfig(r=2, base=base), 0)[0]


@pytest.mark.parametrize("base", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_widths_are_inputs_and_outputs(base, kind):
    layer = nn.Linear(64, 32) if kind is nn.Linear else Conv1D(32, 64)
    assert widths(layer) == widths(adapted(layer, base)) == (64, 32)
    assert is_linear(layer) and not is_linear(nn.Bilinear(2, 2, 2)) and not is_linear(None)


def test_products_of_shards_add_up():
    layer = adapted(nn.Linear(64, 8))
    parameters, x = dict(layer.named_parameters()), torch.randn(3, 64)
    shards = split(layer, False, HALVES)
    assert shards.keys() == {LOW}
    low = parameters[LOW]
    parts = []
    for rank in (0, 1):
        ((start, stop),) = shards[LOW][rank].ranges
        parts.append(x[:, start:stop] @ low.narrow(shards[LOW][rank].dim, start, stop - start).T)
    torch.testing.assert_close(sum(parts), x @ low.T)
    assert split(layer, True, [((0, 4),), ((4, 8),)])[HIGH][1] == ParameterShard(0, ((4, 8),))


def test_packed_weights_are_split_between_groups():
    layer = adapted(nn.Linear(64, 8), "int4")
    shards = split(layer, False, HALVES)
    assert shards["weight"][1] == ParameterShard(1, ((16, 32),))
    with pytest.raises(ValueError, match="between 32 inputs that share a scale"):
        split(layer, False, [((0, 16),), ((16, 64),)])


def test_names_are_read_from_the_end():
    assert leaf_name("layers.0.q") == "q" and parent_name("layers.0.q") == "layers.0"
    assert leaf_name("q") == "q" and parent_name("q") == ""
    assert head_name(nn.Linear(2, 2)) is None


SIZES = {
    "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
    "vocab_size": 16,
}


def made(model_class, config):
    with torch.device("meta"):
        return model_class(config)


def names(units):
    return [(unit.columns, unit.rows, unit.heads) for unit in units]


def test_a_plan_of_transformers_gives_attention_and_mlp():
    model = made(LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=1))
    layer = "model.layers.0"
    assert names(find_rules(model).units) == [
        (tuple(f"{layer}.self_attn.{n}_proj" for n in "qkv"), (f"{layer}.self_attn.o_proj",), True),
        ((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), (f"{layer}.mlp.down_proj",), False),
    ]


def test_a_model_without_plan_is_sharded_by_names():
    layer = "encoder.layer.0"
    attention, first, second = (
        f"{layer}.attention", f"{layer}.intermediate.dense", f"{layer}.output.dense"
    )
    assert names(find_rules(made(BertModel, BertConfig(**SIZES))).units) == [
        ((first,), (second,), False),
        (tuple(f"{attention}.self.{n}" for n in ("query", "key", "value")),
         (f"{attention}.output.dense",), True),
    ]


@pytest.mark.parametrize("inner", [8, 12])
def test_names_count_only_with_matching_widths(inner):
    mlp = nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(inner, 4)})
    assert len(find_rules(nn.ModuleDict({"mlp": mlp})).units) == (inner == 8)


@pytest.mark.parametrize(("plan", "message"), [
    ({"layers.*.up": "colwise"}, "'colwise', but nothing in 'layers.0' has 'rowwise'"),
    ({"layers.*.up": "diagonal"}, "'layers.0.up' has the style 'diagonal'"),
])
def test_a_plan_that_is_not_supported_is_named(plan, message):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(2, 2)})])
    model._tp_plan = plan
    with pytest.raises(ModelError, match=message):
        find_rules(model)


def test_numbers_of_layers_are_generic():
    assert generic("layers.12.experts.3") == "layers.*.experts.*" and generic("wi_0.x") == "wi_0.x"
