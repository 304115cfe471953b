"""Sources that train a few parameters of another source's module."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.new_rows import is_new_rows
from raymm.actors.weights.adapted_source import AdaptedSource, NewRowsSource
from raymm.actors.weights.source import ConfigSource

CONFIG = LlamaConfig(
    hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16
)
BASE = ConfigSource(LlamaForCausalLM, CONFIG)
IDS = torch.arange(5)[None]


def trained(module):
    return {name for name, p in module.named_parameters() if p.requires_grad}


def test_only_adapters_of_the_part_are_trained():
    source = AdaptedSource.of(BASE, LoraConfig(r=2), 0, places=("model.layers.0.mlp",),
                              outside=False)  # fmt: skip
    assert source.targets == tuple(
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
    )
    module = source.build()
    adapters = {name for name, _ in module.named_parameters() if is_adapter(name)}
    plain = {name for name, _ in BASE.build().named_parameters()}
    assert len(adapters) == 6
    assert trained(module) == adapters | {n for n in plain if ".mlp." not in n}
    assert torch.equal(module.eval()(IDS).logits, BASE.build().eval()(IDS).logits)
    assert source.origin is BASE and source.config is CONFIG


def test_a_frozen_source_trains_nothing():
    lora = LoraConfig(r=2)
    assert trained(AdaptedSource.of(BASE, lora, 0).build())
    frozen = AdaptedSource(BASE, lora, 0, ("model.layers.0.mlp.up_proj",), frozen=True)
    assert not trained(frozen.build())


def test_new_rows_start_with_the_values_of_the_base():
    module, base = NewRowsSource(BASE, 12, 16).build(), BASE.build()
    rows = [name for name, _ in module.named_parameters() if is_new_rows(name)]
    assert len(rows) == 2  # embedding and head
    for name in rows:
        weight = name.replace("new_rows", "weight")
        assert torch.equal(module.get_parameter(name), base.get_parameter(weight)[12:16])
        assert name in trained(module) and weight not in trained(module)
    torch.testing.assert_close(module.eval()(IDS).logits, base.eval()(IDS).logits)
