"""Stochastic rounding, and updates of bf16 parameters."""

from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raymm.actors.optimizer import bf16_parameters
from raymm.actors.optimizer.bf16_parameters import Bf16Parameter, rounded_at_random
from raymm.actors.sharding.parameter_shards import ParameterPart
from raymm.scheduler.plan.stage import StageId

KEY = (StageId("llm", 0), "module.weight")


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 10**6))
def test_a_value_becomes_one_of_its_neighbours(value, seed):
    values = torch.full((64,), value)
    rounded = rounded_at_random(values, seed).float()
    nearest = values.bfloat16().float()
    spacing = values.abs() * 2**-7 + 1e-38
    assert ((rounded - values).abs() <= spacing).all()
    assert rounded.unique().numel() <= 2
    kept = rounded_at_random(nearest, seed).float()
    assert kept.equal(nearest)


def test_the_mean_of_rounded_values_is_exact():
    """Check an update of a hundredth of bf16's resolution."""
    values = torch.full((2**18,), 1 + 2**-7 / 100)
    mean = rounded_at_random(values, 0).double().mean()
    assert abs(float(mean) - float(values[0])) < 2**-7 / 500
    assert values.bfloat16().eq(1).all()


def test_non_finite_values_stay_non_finite():
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(rounded_at_random(values, 1).isfinite(), torch.zeros(3).bool())


def test_a_master_follows_changed_parameters():
    parameter = nn.Parameter(torch.randn(4, 4))
    before = parameter.detach().clone()
    kept = Bf16Parameter(KEY, parameter, master=True)
    kept.follow()
    assert kept.wide.equal(before)
    with torch.no_grad():
        parameter[0] = 3.0
    kept.follow()
    assert kept.wide[0].eq(3).all() and kept.wide[1:].equal(before[1:])


@given(st.data())
def test_shards_round_like_the_full_parameter(data):
    """Use any shard of rows, columns or planes."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    edges = sorted(data.draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    values = torch.randn(shape)
    local = torch.cat([values.narrow(dim, a, b - a) for a, b in ranges], dim)
    with patch.object(bf16_parameters, "NOISE_BLOCK", data.draw(st.sampled_from([1, 20, 2**22]))):
        whole = rounded_at_random(values, 3)
        mine = rounded_at_random(local, 3, ParameterPart(shape, dim, ranges))
    due = torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
    assert mine.equal(due)


def test_noise_differs_by_seed_of_the_run_step_and_name():
    def rounded(seed=0, step=0, name="module.weight"):
        parameter = nn.Parameter(torch.full((64, 64), 1 + 2**-9))
        kept = Bf16Parameter((KEY[0], name), parameter, master=False, seed=seed)
        kept.wide.data = torch.full((64, 64), 1 + 2**-9)
        kept.close(step)
        return parameter.detach()

    assert rounded().equal(rounded())
    others = rounded(seed=1), rounded(step=1), rounded(name="module.other")
    assert not any(rounded().equal(other) for other in others)
