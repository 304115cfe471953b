"""Layers that get adapters."""

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.targets import find_targets
from raymm.errors import ModelError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(4, 4), "up": Conv1D(8, 4), "norm": nn.LayerNorm(4)})
            for _ in range(2)
        )
        self.head = nn.Linear(4, 4)

    def get_output_embeddings(self):
        return self.head


def targets(chosen, **options):
    return find_targets(Model(), LoraConfig(targets=chosen), **options)


def test_all_linear_leaves_the_head_out():
    assert targets("all-linear") == ("layers.0.q", "layers.0.up", "layers.1.q", "layers.1.up")


@pytest.mark.parametrize(("chosen", "due"), [
    (("q",), ("layers.0.q", "layers.1.q")),
    (("head", "1.up"), ("layers.1.up", "head")),
    (r"layers\.0\..*[qp]", ("layers.0.q", "layers.0.up")),
])
def test_names_endings_and_expressions_choose_layers(chosen, due):
    assert targets(chosen) == due


def test_only_layers_of_the_part_are_adapted():
    assert targets("all-linear", among=lambda name: "layers.1" in name) == (
        "layers.1.q", "layers.1.up",
    )


@pytest.mark.parametrize(("chosen", "message"), [
    (("k",), "'k', which matches no layer of Model; accepted"),
    (("roj",), "'roj', which matches no layer"),
    (("norm",), "'layers.0.norm' is a LayerNorm; accepted"),
    ("(", "not a valid regular expression"),
])
def test_a_wrong_target_is_named(chosen, message):
    with pytest.raises(ModelError, match=message):
        targets(chosen)
