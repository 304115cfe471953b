"""Layers that read further inputs of a module."""

import pytest
import torch
from torch import nn

from raymm.errors import ProbeError
from raymm.model.ports import reading_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states, extra=None):
        hidden_states = self.linear(hidden_states)
        return hidden_states if extra is None else hidden_states + extra


class Model(nn.Module):
    """Reads ``deep`` in blocks 1 and 3, ``head`` after the last block, ``first`` before all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, deep, head, first, unused):
        x = x + first
        for number, block in enumerate(self.layers):
            x = block(x, extra=deep if number in (1, 3) else None)
        return {"logits": x * head}


def ports():
    names = ("deep", "head", "first", "unused")
    return {name: torch.zeros(2, 4, device="meta", requires_grad=True) for name in names}


def test_blocks_that_read_a_port_are_found():
    model, tensors = Model().to("meta"), ports()
    x = torch.zeros(2, 4, device="meta")
    assert reading_layers(model, lambda module: module(x, **tensors), tensors) == {
        "deep": (1, 3), "head": (3,), "first": (0,), "unused": (),
    }
    assert not any(block._forward_pre_hooks for block in model.layers)


def test_a_module_that_fails_is_named():
    tensors = ports()
    with pytest.raises(ProbeError, match="Model does not run with deep, head, first, unused"):
        reading_layers(Model().to("meta"), lambda module: module(tensors["deep"]), tensors)
