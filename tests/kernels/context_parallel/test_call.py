"""Attention over parts of the keys, merged, equals attention over all keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import (
    ContextCall,
    ContextGroup,
    merge_partials,
    output_like,
    row_delta,
    with_tokens,
)
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.patterns import causal


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Yield the exchange of a group of this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Exchange()
    dist.destroy_process_group()


def call_of(exchange: Exchange, length: int) -> ContextCall:
    layout = ContextLayout.even(length, 1)
    return ContextCall(ContextGroup(exchange, layout, layout), (causal(length),), scale=0.5)


def tensors(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("cut", [0, 1, 9, 12])
def test_parts_merge_to_the_whole(alone, cut):
    call = call_of(alone, 12)
    query, key, value, grad_out = tensors(12)
    (mask,) = call.masks
    whole, lse = call.forward(query, key, value, call.masks)
    grads = call.backward(grad_out, query, key, value, lse, row_delta(grad_out, whole), call.masks)
    parts, sums = [], []
    for a, b in ((0, cut), (cut, 12)):
        part = (mask.select_keys([(a, b)] if a < b else []),)
        k, v = key[:, :, a:b], value[:, :, a:b]
        parts.append(call.forward(query, k, v, part))
        delta = row_delta(grad_out, whole)
        sums.append(call.backward(grad_out, query, k, v, lse, delta, part))
    merged, merged_lse = merge_partials(*parts[0], *parts[1])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)
    torch.testing.assert_close(sums[0][0] + sums[1][0], grads[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([sums[0][i], sums[1][i]], 2), grads[i])


def test_rows_that_no_part_shows_a_key_stay_empty():
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    merged, merged_lse = merge_partials(out, lse, out, lse)
    assert not merged.any() and (merged_lse == -torch.inf).all()


@given(st.integers(0, 2**31), st.sampled_from([1e-20, 1.0, 1e20]))
def test_an_output_has_the_given_delta(seed, size):
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(2, 3, 4, 8, generator=generator) * size
    delta = torch.randn(2, 3, 4, generator=generator)
    found = (grad_out.double() * output_like(grad_out, delta).double()).sum(-1)
    torch.testing.assert_close(found, delta.double(), atol=1e-5, rtol=1e-4)
    assert not output_like(torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1)).any()


def test_layouts_must_have_the_ranks_of_the_group(alone):
    one, two = ContextLayout.even(4, 1), ContextLayout.even(4, 2)
    with pytest.raises(ModelError, match="keys are split over 2 ranks; the group has 1"):
        ContextGroup(alone, one, two)
    assert with_tokens((1, 2, 3, 4), 9) == (1, 2, 9, 4)
