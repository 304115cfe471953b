"""8-bit AdamW compared with torchao's, and moments that are restored bit for bit."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchao.optim import AdamW8bit as TorchAO
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap, scale_tensor

from raymm.actors.optimizer.adamw_8bit import (
    BLOCK,
    AdamW8bit,
    Moment,
    dynamic_map,
    needs_agreement,
)
from raymm.actors.sharding.parameter_shards import ParameterPart
from raymm.kernels.collectives.tensor_group import thread_groups

SHAPES = ((64, 64), (48, 96), (16, 16), (65, 65))  # quantised, quantised, too small, no blocks


@pytest.mark.parametrize("signed", [True, False])
def test_the_quantisation_map_equals_torchao(signed):
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
    assert other.max() <= 1 and (other > 0).float().mean() < 1e-2  # exactly between two codes


@given(st.integers(0, 10**6), st.floats(-16, 3), st.booleans())
def test_values_give_the_same_moment_again(seed, size, signed):
    moment = Moment.of(blocks(seed, size, signed), signed)
    again = Moment.of(moment.values(), signed, again=True)
    assert again.codes.equal(moment.codes) and again.scales.equal(moment.scales)


def test_steps_equal_torchao():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    due = [nn.Parameter(p.detach().clone()) for p in mine]
    before = [p.detach().clone() for p in mine]
    own = AdamW8bit([{
        "params": mine, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1,
    }])
    oracle = TorchAO(due, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(5):
            for one, other in zip(mine, due, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            own.step(torch.zeros(()))
            oracle.step()
    for one, other, start in zip(mine, due, before, strict=True):
        assert (one - other).norm() <= 2e-3 * (other - start).norm()


def test_bytes_of_8_bit_moments():
    parameter = nn.Parameter(torch.randn(64, 64))
    optimizer = AdamW8bit([
        {"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
    ])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step(torch.zeros(()))
    state = optimizer.state[parameter]
    held = sum(t.nbytes for name in ("exp_avg", "exp_avg_sq") for t in state[name][:2])
    assert held == 2 * (64 * 64 + 4 * 64 * 64 // BLOCK)


def cut(shape: tuple[int, ...], dim: int, edges: list[int]) -> list[ParameterPart]:
    """Return the parts of processes between consecutive edges; some may be empty."""
    return [
        ParameterPart(shape, dim, (own,), tuple(sorted(set(edges)))) for own in pairwise(edges)
    ]


def taken(whole: torch.Tensor, part: ParameterPart) -> torch.Tensor:
    ((start, stop),) = part.ranges
    return whole.narrow(part.dim, start, stop - start).clone()


def trained(start, gradients, parts, state=None, refused=()):
    """Return the full parameter and its plain state after steps of sharded processes."""
    whole, results = parts[0] is None, {}

    def work(number, group):
        part = parts[number]
        own = (lambda t: t.clone()) if whole else (lambda t: taken(t, part))
        parameter = nn.Parameter(own(start))
        optimizer = AdamW8bit(
            [{"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6,
              "weight_decay": 0.1}],
            {} if whole else {id(parameter): part},
            lambda _, bounds: group.all_reduce_max(bounds),
        )
        if state is not None:
            optimizer.load_plain_state(
                parameter, {n: v if n == "step" else own(v) for n, v in state.items()}
            )
        for step, gradient in enumerate(gradients):
            parameter.grad = own(gradient)
            optimizer.step(torch.tensor(float(step in refused)))
        results[number] = parameter.detach(), optimizer.plain_state(parameter)

    threads = [
        threading.Thread(target=work, args=pair) for pair in enumerate(thread_groups(len(parts)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [results[number] for number in range(len(parts))]
    dim = 0 if whole else parts[0].dim
    joined = {
        name: done[0][1][name] if name == "step" else torch.cat([own[name] for _, own in done], dim)
        for name in done[0][1]
    }
    return torch.cat([parameter for parameter, _ in done], dim), joined


@pytest.mark.parametrize(("shape", "dim", "edges"), [
    ((96, 64), 0, [0, 48, 96]), ((64, 96), 1, [0, 48, 96]), ((3, 2048), 0, [0, 1, 2, 3, 3]),
    ((50, 128), 0, [0, 17, 50]), ((4, 32, 48), 2, [0, 24, 48]), ((4, 32, 48), 1, [0, 5, 32]),
    ((16, 768), 1, [0, 256, 768]), ((8192,), 0, [0, 4097, 8192]), ((65, 65), 0, [0, 33, 65]),
])
def test_moments_do_not_depend_on_shards(shape, dim, edges):
    """Check also the stored state, which another layout resumes bit for bit."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(5)]
    parts = cut(shape, dim, edges)
    due, due_state = trained(start, gradients, [None], refused={1})
    half, half_state = trained(start, gradients[:3], parts, refused={1})
    for resumed in (parts, [None], cut(shape, 0, [0, 1, shape[0]])):
        mine, state = trained(half, gradients[3:], resumed, half_state)
        assert mine.equal(due)
        assert all(state[name].equal(value) for name, value in due_state.items())


def test_shards_of_whole_blocks_need_no_agreement():
    assert not any(map(needs_agreement, cut((64, 512), 0, [0, 3, 64])))
    assert not any(map(needs_agreement, cut((64, 512), 1, [0, 256, 512])))
    assert not any(map(needs_agreement, cut((65, 65), 0, [0, 33, 65])))  # fp32 anyway
    assert all(map(needs_agreement, cut((96, 64), 0, [0, 2, 32, 96])))
