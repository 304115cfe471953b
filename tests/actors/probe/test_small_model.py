"""Small copies of a model."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from raymm.actors.probe.small_model import small_model, trial_copy
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


class _Tied(nn.Module):
    """Two linear layers with the same weights, the first with a frozen bias."""

    first: nn.Linear
    last: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def test_a_trial_copy_is_independent_of_the_model() -> None:
    """Writes, gradients and buffers of a copy do not reach the model, nor the other way round."""
    model = _Tied()
    values = _values(model)
    copied = trial_copy(model)
    assert copied.last.weight is copied.first.weight is not model.first.weight
    assert not copied.first.bias.requires_grad and copied.last.bias.requires_grad
    copied(torch.randn(4, 3)).square().sum().backward()
    assert copied.first.weight.grad is not None and model.first.weight.grad is None
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    torch.testing.assert_close(_values(model), values, rtol=0, atol=0)
    again = trial_copy(model)
    with torch.no_grad():
        model.first.weight.zero_()
    torch.testing.assert_close(_values(again), values, rtol=0, atol=0)


def test_weights_of_a_file_are_copied(tmp_path: Path) -> None:
    """Torch shares memory that it allocated, not that of a mapped file."""
    save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "x.safetensors")
    model = nn.Linear(3, 3)
    model.load_state_dict(load_file(tmp_path / "x.safetensors"), assign=True)
    copied = trial_copy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert model.weight.sum() == 9
