"""Shards of the parameters around an adapted layer."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import HIGH, LOW, adapt
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.sharding.tensor_units import (
    ParameterShard,
    head_name,
    is_linear,
    leaf_name,
    parent_name,
    split,
    widths,
)

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
