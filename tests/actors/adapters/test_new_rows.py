"""Rows of new tokens train as in a model whose other rows keep their values."""

import copy

import pytest
import torch
from torch import nn

from raymm.actors.adapters.new_rows import add_rows, merge_rows
from raymm.errors import ModelError

NEW = range(3, 5)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).tanh())


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_changes_the_new_rows_only(tied: bool) -> None:
    torch.manual_seed(0)
    plain = Model(tied)
    model = add_rows(copy.deepcopy(plain), NEW)
    ids = torch.tensor([[0, 3, 4, 5], [3, 1, 2, 4]])
    for each in (plain, model):
        each.head.bias.requires_grad_(False)
        each(ids).square().sum().backward()
    with torch.no_grad():
        for weight in {plain.embed.weight, plain.head.weight}:  # one tensor if they are tied
            weight[NEW.start : NEW.stop] -= weight.grad[NEW.start : NEW.stop]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    torch.testing.assert_close(model(ids), plain(ids))
    merge_rows(model)
    assert type(model.embed) is nn.Embedding and type(model.head) is nn.Linear
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_another_head_is_refused() -> None:
    model = Model(False)
    model.head = nn.Bilinear(4, 4, 6)
    with pytest.raises(ModelError, match="is of class Bilinear; accepted: nn.Linear"):
        add_rows(model, NEW)
