"""Custom losses are tried before a run; their sums are those of any split of the tokens."""

import pytest
import torch
import torch.nn.functional as F

from raymm.actors.stages.token_loss import check_token_loss, token_loss_sum
from raymm.errors import ConfigError, ModelError
from tests.support import custom_losses


def test_the_sum_is_that_of_the_tokens():
    logits, targets = torch.randn(7, 5), torch.randint(5, (7,))
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    check_token_loss("model.loss", custom_losses.smoothed, 9)
    assert torch.allclose(token_loss_sum(custom_losses.smoothed, logits, targets), expected)


@pytest.mark.parametrize(("name", "reason"), [
    ("mean", r"ModelError: it returned \[\] for 5 tokens"), ("number", "it returned float for 5"),
    ("relative", "the loss of a token depends on other tokens"),
    ("failing", "KeyError: 'temperature'"), ("detached", "it has no gradient"),
    ("infinite", "its sum is inf"),
])  # fmt: skip
def test_a_loss_that_would_not_be_exact_is_rejected(name, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        check_token_loss("model.loss", getattr(custom_losses, name), None)
    assert str(error.value).startswith(f"model.loss is 'tests.support.custom_losses:{name}'")
    assert "accepted: module:function, which returns the losses (N,)" in str(error.value)


def test_a_wrong_shape_is_an_error_of_the_model():
    with pytest.raises(ModelError, match="for 3 tokens"):
        token_loss_sum(custom_losses.mean, torch.randn(3, 4), torch.zeros(3).long())
