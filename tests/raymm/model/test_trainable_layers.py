"""Trainable layers and counts of parameters, compared with torch's own."""

import pytest
import torch
from torch import nn

from raymm.model.trainable_layers import any_trainable, counted, counts_text, trainable_blocks


class Blocks(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


def test_each_block_is_trainable_if_a_parameter_is():
    module = Blocks(4).requires_grad_(False)
    assert trainable_blocks(module, 4) == (False,) * 4 and not any_trainable(module)
    module.layers[1].bias.requires_grad_()
    assert trainable_blocks(module, 4) == (False, True, False, False) and any_trainable(module)


def test_parameters_outside_the_blocks_count_with_both_ends():
    module = Blocks(3).requires_grad_(False)
    module.embed.requires_grad_()
    assert trainable_blocks(module, 3) == (True, False, True)


def test_a_module_that_is_not_cut_is_one_block():
    assert trainable_blocks(nn.Linear(1, 1), 1) == (True,)
    assert trainable_blocks(nn.ReLU(), 1) == (False,)


def test_a_tied_parameter_counts_once():
    module = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4, bias=False)])
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    every = list(module[0].parameters()) + list(module[1].parameters())
    assert counted(every) == (12, sum(p.numel() for p in module.parameters()))
    assert counted(iter([])) == (0, 0) and counted([nn.Parameter(torch.empty(0))]) == (0, 0)


@pytest.mark.parametrize(("counts", "text"), [
    ({"vision": (0, 86_000_000)}, "vision 86M frozen"),
    ({"llm": (1_200_000, 1_240_000_000)}, "llm 1.2M of 1.24B trained"),
    ({"a": (999, 999), "b": (0, 0)}, "a 999 trained, b 0 frozen"),
    ({"a": (1000, 1000)}, "a 1k trained"),
])
def test_counts_are_short(counts, text):
    assert counts_text(counts) == f"parameters: {text}"
