"""The text model of a Hugging Face VLM is called with a process's tokens only."""

import pytest
import torch
from torch import nn

from raymm.actors.sharding.vlm.text_entry import Sharing, TextEntry
from raymm.actors.sharding.vlm.token_share import TokenShare
from raymm.errors import ModelError


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, inputs_embeds, position_ids=None, scale=1):
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1]).expand(inputs_embeds.shape[:2])
        hidden = inputs_embeds * scale + position_ids[..., None]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Vlm(nn.Module):
    def __init__(self, times=1) -> None:
        super().__init__()
        self.text, self.times = Text(), times

    def forward(self, embeds):
        for _ in range(self.times):
            output = self.text(inputs_embeds=embeds * 2, scale=3)
        return output


EMBEDS = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("share", [
    TokenShare((4, 6), range(1, 3)), TokenShare((4, 6), None, torch.tensor([0, 5, 3])),
    TokenShare((4, 6), range(2, 4), torch.tensor([4])),
])
def test_results_are_those_of_the_share_of_the_complete_text(share):
    model = Vlm()
    expected = model(EMBEDS)
    entry = TextEntry(model, "text.layers")
    with entry.sharing(Sharing(share)):
        torch.testing.assert_close(model(EMBEDS), share.of_tokens(expected))
    assert torch.equal(model(EMBEDS), expected)  # complete again


@pytest.mark.parametrize(("times", "shape", "message"), [
    (2, (4, 6), "its Text is called twice in a forward"),
    (1, (4, 5), r"its Text is called with embeddings \(4, 6, 2\), not \(4, 5, 'width'\)"),
])
def test_a_text_model_that_cannot_be_split_is_named(times, shape, message):
    model = Vlm(times)
    entry = TextEntry(model, "text.layers")
    with pytest.raises(ModelError, match=message), entry.sharing(Sharing(TokenShare(shape))):
        model(EMBEDS)
    assert Vlm(times)(EMBEDS).shape == EMBEDS.shape
