"""Comparison of a model with its stages."""

import pytest
import torch
from torch import nn

from raymm.actors.probe.stage_comparison import compare_stages, skips_blocks, uncut_forward
from raymm.errors import NotRunError, ProbeError


class Model(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.norm = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        first = hidden = self.embed(x)
        for block in self.blocks:
            if self.kind == "skips" and self.training and torch.rand(()) < 0.1:
                continue
            hidden = block(hidden)
            if self.kind == "twice":
                hidden = block(hidden)
        return self.norm(hidden) + (first if self.kind == "shortcut" else 0)


def run(model, first):
    x = torch.linspace(-1, 1, 8).view(2, 4)
    return model(x if first else torch.zeros_like(x))


def test_parameters_around_the_blocks_are_in_the_stages_that_use_them():
    info = compare_stages(Model().eval(), "blocks", run, trains=True)
    assert info.blocks == "blocks" and info.tuple_length == 0
    assert info.first == {"embed.weight", "embed.bias"}
    assert info.last == {"norm.weight", "norm.bias"}
    assert not info.middle


@pytest.mark.parametrize(("kind", "message"), [
    ("shortcut", "something besides the hidden state"), ("twice", "runs its first block 2 times"),
])
def test_models_that_cannot_be_cut_are_refused(kind, message):
    with pytest.raises(ProbeError, match=message):
        compare_stages(Model(kind).eval(), "blocks", run, trains=False)


def test_blocks_that_are_rarely_skipped_are_found():
    assert skips_blocks(Model("skips").train(), "blocks", run)
    assert not skips_blocks(Model("skips").eval(), "blocks", run)


def test_a_forward_reports_its_blocks():
    forward = uncut_forward(Model(), "blocks", run, 0)
    assert forward.called == (0, 1, 2, 3) and forward.shapes[3] == (2, 4)
    with pytest.raises(NotRunError, match="Model does not run as stages run it"):
        compare_stages(Model().eval(), "blocks", lambda model, _: model(None), trains=False)
