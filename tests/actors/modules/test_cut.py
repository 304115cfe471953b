"""Stages of a module, run through its own forward."""

import copy

import pytest
import torch
from torch import nn

from raymm.actors.modules.cut import CutInfo, Passage, prune, stage_parameters
from raymm.errors import ForwardLeft


class Model(nn.Module):
    """Also reads the output of its second block at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        hidden, early = self.embed(x), 0
        for number, block in enumerate(self.blocks):
            hidden = block(hidden.tanh())
            early = hidden if number == 1 else early
        return self.norm(hidden + early)


INFO = CutInfo(
    "blocks", 0, frozenset({"embed.weight", "embed.bias"}), frozenset(),
    frozenset({"norm.weight", "norm.bias"}), relayed=(1,),
)


@pytest.mark.parametrize("bounds", [[0, 2, 4, 5], [0, 1, 3, 5]])
def test_stages_give_the_results_and_gradients_of_the_module(bounds):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 3)
    expected = model(x)
    expected.square().sum().backward()
    received, relays, stages = None, (), []
    for lo, hi in zip(bounds, bounds[1:], strict=False):
        stage = prune(copy.deepcopy(model), INFO, lo, hi)
        stage.zero_grad()
        stages.append(stage)
        assert {n for n, _ in stage.named_parameters()} == set(
            stage_parameters(model, INFO, lo, hi)
        )
        try:
            with Passage(stage, INFO, lo, hi).open(received, "the forward", relays):
                output = stage(x if lo == 0 else torch.zeros_like(x))
        except ForwardLeft as left:
            received, relays = left.value, left.relays
    assert torch.equal(output, expected)
    output.square().sum().backward()
    gradients = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_blocks_of_other_stages_have_only_plain_attributes():
    stage = prune(Model(), INFO, 0, 2)
    assert stage.blocks[4].in_features == 4 and stage.blocks[4].weight.dtype == torch.float32
    assert isinstance(stage.blocks[4], nn.Linear)
    with pytest.raises(AttributeError):
        stage.blocks[4].weight_of_another_class()
