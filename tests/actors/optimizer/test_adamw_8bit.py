"""8-bit AdamW against torchao's, and moments that come back bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchao.optim import AdamW8bit as TorchAO
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap, scale_tensor

from raymm.actors.optimizer.adamw_8bit import BLOCK, AdamW8bit, Moment, dynamic_map

SHAPES = ((64, 64), (48, 96), (16, 16), (65, 65))  # quantised, quantised, too small, no blocks


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_torchaos(signed):
    assert dynamic_map(signed).tolist() == torch.tensor(create_dynamic_map(signed)).tolist()


def blocks(seed: int, size: float, signed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(16, BLOCK, generator=generator) * 10**size
    values *= torch.rand(16, 1, generator=generator)
    return values if signed else values.abs()


@given(st.integers(0, 10**6), st.floats(-8, 3), st.booleans())
def test_codes_are_the_nearest(seed, size, signed):
    values = blocks(seed, size, signed)
    moment = Moment.of(values, signed)
    scaled, _ = scale_tensor(values, BLOCK)
    due = quantize_8bit_with_qmap(scaled, dynamic_map(signed)).int()
    other = (moment.codes.int() - due).abs()
    assert other.max() <= 1 and (other > 0).float().mean() < 1e-2  # just between two codes


@given(st.integers(0, 10**6), st.floats(-16, 3), st.booleans())
def test_values_give_the_same_moment_again(seed, size, signed):
    moment = Moment.of(blocks(seed, size, signed), signed)
    again = Moment.of(moment.values(), signed, again=True)
    assert again.codes.equal(moment.codes) and again.scales.equal(moment.scales)


def test_steps_are_torchaos():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    due = [nn.Parameter(p.detach().clone()) for p in mine]
    before = [p.detach().clone() for p in mine]
    own = AdamW8bit([{
        "params": mine, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1,
    }])
    own.found_inf = torch.zeros(())
    oracle = TorchAO(due, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(5):
            for one, other in zip(mine, due, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            own.step()
            oracle.step()
    for one, other, start in zip(mine, due, before, strict=True):
        assert (one - other).norm() <= 2e-3 * (other - start).norm()


def test_bytes_of_its_moments():
    parameter = nn.Parameter(torch.randn(64, 64))
    optimizer = AdamW8bit([
        {"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
    ])
    optimizer.found_inf = torch.zeros(())
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    held = sum(t.nbytes for name in ("exp_avg", "exp_avg_sq") for t in state[name][:2])
    assert held == 2 * (64 * 64 + 4 * 64 * 64 // BLOCK)
