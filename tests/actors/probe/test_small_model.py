"""Small copies of a model."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from raymm.actors.probe.small_model import small_model
from raymm.actors.weights.source import ConfigSource


def _config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        vocab_size=512,
    )  # fmt: skip


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_a_caller_may_change_its_copy() -> None:
    """Later copies of a source equal the first one, whatever callers did to theirs."""
    source, other = (ConfigSource(LlamaForCausalLM, _config()) for _ in range(2))
    first = small_model(source)
    values = _values(first)
    for _ in range(2):
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.zero_()
        first.train().requires_grad_(False)
        again = small_model(source)
        torch.testing.assert_close(_values(again), values, rtol=0, atol=0)
        assert not again.training
        assert all(parameter.requires_grad for parameter in again.parameters())
        first = again
    small_model(other)  # replaces the kept copy
    torch.testing.assert_close(_values(small_model(source)), values, rtol=0, atol=0)


class _Uncopied(LlamaForCausalLM):
    """Keeps a tensor computed from a parameter, which ``deepcopy`` refuses."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        with torch.enable_grad():
            self.doubled = 2 * self.lm_head.weight.requires_grad_(True)


def test_a_model_that_cannot_be_copied_is_made_again() -> None:
    source = ConfigSource(_Uncopied, _config())
    first = small_model(source)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(first)
    again = small_model(source)
    assert again is not first
    torch.testing.assert_close(_values(again), _values(first), rtol=0, atol=0)
