"""Triton attention, forward and backward, compared with the float64 oracle.

Interpreted without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.attention_case import BOUNDS, Case, inputs, options, part_errors
from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.mask import patterns
from raymm.kernels.mask.spans import Span
from tests.support.interpreted_triton import device, errors, run
from tests.support.random_masks import tables

PATTERNS = list(every_pattern(57))


def check(triton_worker, case: Case) -> None:
    found = triton_worker(errors, case)
    assert max(found.values()) <= BOUNDS[case.dtype], found


# Length, blocks, processors: small lengths are split too, as there are more processors (16) than
# blocks. Every pattern is split, and is not, at two of the four sizes of blocks.
SPLIT = (57, (16, 32), 16), (144, (32, 64), 16)
WHOLE = (283, (64, 128), None), (500, (128, 128), None)


# Tiles by tensor descriptors and by addresses, alternating.
@pytest.mark.cells(24)
@pytest.mark.parametrize(
    ("pattern", "length", "blocks", "processors", "descriptors"),
    [
        (name, *size[i % 2], bool((i + (size is WHOLE)) % 2))
        for i, name in enumerate(PATTERNS) for size in (SPLIT, WHOLE)
    ],
)
def test_patterns(triton_worker, pattern, length, blocks, processors, descriptors):
    mask = every_pattern(length, seed=length)[pattern]()
    case = Case((mask,), blocks=blocks, processors=processors, descriptors=descriptors)
    check(triton_worker, case)


def test_long(triton_worker):
    mask = every_pattern(4352, seed=1)["own_image_window"]()
    check(triton_worker, Case((mask,), blocks=(256, 256)))


@settings(suppress_health_check=list(HealthCheck))
@given(mask=tables(), descriptors=st.booleans())
def test_any_table(triton_worker, mask, descriptors):
    case = Case((mask,), (2, 1), blocks=(32, 16), processors=8, descriptors=descriptors)
    check(triton_worker, case)


def _same_by_descriptors(case: Case) -> None:
    by_address, by_descriptors = (run(replace(case, descriptors=d)) for d in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(by_address, by_descriptors, strict=True))


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_descriptors_and_addresses_give_the_same_bits(triton_worker, head_dim, dtype):
    """Use lengths that no block divides, two sequences, grouped heads, columns past the head dim.
    """
    masks = tuple(every_pattern(53, seed)["ee"]() for seed in range(2))
    case = Case(masks, (2, 1), head_dim, dtype, blocks=(32, 16), processors=16)
    triton_worker(_same_by_descriptors, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pattern", ["causal", "ee_isolated", "mp_window", "cross_all"])
def test_half_precision(triton_worker, pattern, dtype):
    mask = every_pattern(283)[pattern]()
    check(triton_worker, Case((mask,), (2, 1), 64, dtype))


@pytest.mark.parametrize(
    ("heads", "processors"), [((2, 2), 64), ((4, 1), None), ((4, 2), 64), ((8, 1), None)]
)
def test_grouped_queries(triton_worker, heads, processors):
    mask = every_pattern(144)["ee"]()
    check(triton_worker, Case((mask,), heads, blocks=(64, 64), processors=processors))


@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_with_their_own_blocks(triton_worker, head_dim, dtype):
    # fp32 has small blocks for large head dims.
    mask = every_pattern(57 if dtype == "float32" else 144)["own_image"]()
    for softcap in (None, 20.0) if head_dim in (128, 256, 512) else (None,):
        check(triton_worker, Case((mask,), (1, 1), head_dim, dtype, softcap=softcap))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(4, None), (8, 24), (44, None), (40, 32), (96, 64), (32, 88)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_by_columns_of_zeros(triton_worker, head_dim, value_dim, dtype):
    mask = every_pattern(57)["own_image"]()
    check(triton_worker, Case((mask,), (2, 1), head_dim, dtype, value_dim, blocks=(32, 16)))


def test_parts_with_values_of_another_head_dim(triton_worker):
    case = Case((every_pattern(57)["ee"](),), (2, 1), 12, value_dim=20)
    found = triton_worker(part_errors, case, device(), 24)
    assert max(found.values()) <= BOUNDS["float32"], found


def test_batches_of_different_masks(triton_worker):
    first, second = (every_pattern(144, seed)["ee"]() for seed in (0, 1))
    plain = patterns.causal(144)
    for masks in ((first, second, first), (plain, first), (second,), (plain,)):
        for processors in (None, 32):
            check(triton_worker, Case(masks, (2, 1), blocks=(64, 64), processors=processors))


def test_identities_beyond_bit_31(triton_worker):
    spans = [Span(10, 30, 40), Span(40, 60, 62), Span(70, 90, 1)]
    check(triton_worker, Case((patterns.embedded(100, spans),), blocks=(32, 32)))


@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0), (1, 1), (1, 130), (130, 1)])
def test_odd_sizes(triton_worker, shape):
    mask = patterns.full(*shape)
    for processors in (None, 4):
        check(triton_worker, Case((mask,), (2, 1), blocks=(16, 16), processors=processors))


def _recomputed(case: Case) -> None:
    from torch.utils.checkpoint import checkpoint

    from raymm.kernels.flash.gpu.attention import triton_attention

    *leaves, grad_out = (t.to(device()) for t in inputs(case))
    leaves = [t.requires_grad_() for t in leaves]

    def attend(*tensors):
        return triton_attention(*tensors, case.masks, **options(case))[0]

    out = checkpoint(attend, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(out, leaves, grad_out)
    plain = run(case)
    assert torch.equal(out.cpu(), plain[0])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(grads, plain[2:], strict=True))


def test_recomputation(triton_worker):
    triton_worker(_recomputed, Case((every_pattern(144)["mp"](),), (2, 1), blocks=(64, 64)))


def _layouts(case: Case) -> None:
    from raymm.kernels.flash.gpu.attention import triton_attention

    plain = run(case)
    *tensors, grad_out = (t.to(device()) for t in inputs(case))
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    padded = [torch.nn.functional.pad(t, (3, 5))[..., 3:-5] for t in tensors]  # not aligned
    strided = [t.mT.contiguous().mT for t in tensors]  # last stride not 1
    for form in (by_token, padded, strided):
        leaves = [t.requires_grad_() for t in form]
        out, lse = triton_attention(*leaves, case.masks, **options(case))
        # An expanded gradient, like that of a sum.
        grads = torch.autograd.grad(out, leaves, grad_out.mT.contiguous().mT)
        found = [t.detach().cpu() for t in (out, lse, *grads)]
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    leaf = tensors[0].detach().requires_grad_()
    out, _ = triton_attention(leaf, *tensors[1:], case.masks, **options(case))
    (from_sum,) = torch.autograd.grad(out.sum(), leaf)
    out, _ = triton_attention(leaf, *tensors[1:], case.masks, **options(case))
    (from_ones,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert torch.equal(from_sum, from_ones)


def test_layouts_in_memory(triton_worker):
    masks = tuple(every_pattern(57, seed)["ee"]() for seed in range(2))
    triton_worker(_layouts, Case(masks, (4, 2), 40, blocks=(64, 64)))


def test_refusals():
    """Check that errors name the value and what is accepted, without GPU or interpreter."""
    from raymm.kernels.flash.gpu.attention import triton_attention

    query, mask = torch.randn(1, 4, 8, 32), patterns.causal(8)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        triton_attention(query, query[:, :3], query[:, :3], (mask,))
    with pytest.raises(ValueError, match="got 2 masks for a batch of 1"):
        triton_attention(query, query, query, (mask, mask))
    with pytest.raises(ValueError, match="mask 0 is"):
        triton_attention(query, query, query, (patterns.causal(9),))
    with pytest.raises(ValueError, match="one dtype"):
        triton_attention(query, query.half(), query, (mask,))
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        triton_attention(query, query, query, (mask,))
