"""Blocks that change buffers in training compute the same when they are recomputed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raymm.actors.modules.module_state import ForwardBuffers
from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.scheduler.costs.recomputation import ALL, ATTENTION, MATMULS


class Counted(nn.Module):
    """Module that replaces a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + self.training
        return x * self.calls


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6), Counted(), nn.ReLU(), nn.Dropout(0.3),
        spectral_norm(nn.Linear(6, 6)),
    )


def outcome(module: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Run several forwards, then their backwards in order; return gradients and state."""
    torch.manual_seed(1)
    outputs = [module(torch.randn(5, 6)) for _ in range(3)]
    for output in reversed(outputs):
        output.square().sum().backward()
    return [p.grad for p in module.parameters()], dict(module.state_dict())


@pytest.mark.parametrize("option", [ALL, MATMULS, ATTENTION])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_buffers_are_those_of_one_run(option, training):
    kept = block().train(training)
    again = copy.deepcopy(kept)
    recompute_layers([again], [option])
    for _ in range(2):
        (due, state), (gradients, others) = outcome(kept), outcome(again)
        assert all(map(torch.equal, due, gradients))
        assert state.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in state.items())


def test_only_changed_buffers_are_copied():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module.register_buffer("table", torch.zeros(9))
    buffers = ForwardBuffers(module)
    for _ in range(2):
        with buffers.recorded() as before:
            module(torch.randn(4, 3))
    assert sorted(name for _, name, _ in before) == [
        "num_batches_tracked", "running_mean", "running_var"
    ]
