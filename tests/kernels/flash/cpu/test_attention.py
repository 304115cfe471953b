"""CPU attention compared with dense float64 attention: outputs, LSE and gradients.

Errors are relative to each tensor's own norm. fp32 stays within 1e-5. With bf16 inputs the
reference gets the same rounded inputs; outputs and gradients are rounded to bf16 (2^-9) per part
and once more, which the bound of 1e-2 allows for.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.every_mask import every_pattern, table
from raymm.errors import ModelError
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.flash.reference import reference_attention
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from tests.support.random_masks import tables

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}
NAMES = list(every_pattern(64))
LARGE = ("causal", "window", "mp_isolated", "own_image_window", "cross_all")


def inputs(masks, query_heads, key_heads, dim, dtype=torch.float32, value_dim=None, seed=0):
    """Return query, key, value (requiring gradients) and output gradient in projection layout."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(length, heads, width):
        shape = (len(masks), length, heads, width)
        return torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)

    rows, keys = masks[0].shape
    value_dim = value_dim or dim
    query, key = tensor(rows, query_heads, dim), tensor(keys, key_heads, dim)
    value, grad = tensor(keys, key_heads, value_dim), tensor(rows, query_heads, value_dim)
    return [t.requires_grad_() for t in (query, key, value)], grad


def error(found, expected):
    difference, norm = (found.double() - expected).norm().item(), expected.norm().item()
    return difference / norm if norm else difference


def cancelling(tensors, grad) -> float:
    """Return fp32's share of gradient terms that cancel, as in a row that sees one key.

    It bounds the rounding of the gradients of queries and keys.
    """
    query, key, value = (t.detach().double() for t in tensors)
    if not key.numel() or not query.numel():
        return 0.0
    longest = [t.norm(dim=-1).max().item() for t in (query, key, value)]
    terms = grad.double().norm().item() * longest[2] * max(longest[:2])
    return torch.finfo(torch.float32).eps * terms / query.shape[-1] ** 0.5


def check(masks, query_heads=4, key_heads=2, dim=16, dtype=torch.float32, *, attend=cpu_attention,
          value_dim=None, **options):  # fmt: skip
    """Compare output, LSE and gradients with the reference."""
    tensors, grad = inputs(masks, query_heads, key_heads, dim, dtype, value_dim)
    out, lse = attend(*tensors, masks, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # Reentrant checkpoints mark every output.
    assert attend is not cpu_attention or not lse.requires_grad
    out.backward(grad)  # reentrant checkpoints do not support autograd.grad
    gradients = [t.grad for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    visible = torch.stack([mask.dense() for mask in masks])
    expected, expected_lse = reference_attention(*exact, visible, **options)
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    assert error(lse[~empty], expected_lse[~empty]) <= max(1e-5, BOUND[dtype] / 100)
    assert error(out, expected) <= BOUND[dtype]
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    for name, one, other in zip("qkv", gradients, expected_gradients, strict=True):
        assert one.dtype == dtype
        rounding = 0.0 if name == "v" else cancelling(tensors, grad)
        off = (one.double() - other).norm().item()
        assert off <= max(BOUND[dtype] * other.norm().item(), rounding), name
    assert not gradients[0][empty].any()


@pytest.mark.parametrize("length", [57, 144, 283])
@pytest.mark.parametrize("name", NAMES)
def test_every_pattern(name, length):
    mask = every_pattern(length)[name]()
    check((mask,), 8, 2)
    check((mask,), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_every_pattern_at_1000(name):
    check((every_pattern(1000)[name](),), 2, 1)


@pytest.mark.parametrize("name", LARGE)
def test_large(name):
    check((every_pattern(4352)[name](),), 1, 1, 8)


def test_large_bf16():
    """Keep parts of the backward in bf16; key gradients sum over many blocks."""
    check((patterns.causal(4352),), 1, 1, 8, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_soft_cap(name):
    mask = every_pattern(144)[name]()
    check((mask,), softcap=2.0)
    check((mask,), dtype=torch.bfloat16, softcap=2.0)


def test_soft_cap_over_many_portions_of_keys():
    check((patterns.causal(2500),), 1, 1, 8, softcap=2.0)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["ee", "mp_isolated", "own_image_window"])
def test_grouped_heads(name, heads):
    mask = every_pattern(300)[name]()
    for dtype in (torch.float32, torch.bfloat16):
        check((mask,), *heads, dtype=dtype)
    check((mask,), *heads, softcap=3.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype):
    check((every_pattern(144)["mp"](),), dtype=dtype)


@pytest.mark.parametrize("dim", [5, 32, 80, 256])
def test_head_dims(dim):
    check((every_pattern(144)["own_image_window"](),), dim=dim)


def test_values_of_another_width():
    for dtype in (torch.float32, torch.bfloat16):
        check((every_pattern(144)["ee"](),), dim=24, value_dim=16, dtype=dtype)


def test_scale():
    check((every_pattern(144)["mp"](),), scale=0.5)


def test_batch_of_different_masks():
    built = [every_pattern(144, seed)[name]() for seed, name in enumerate(NAMES[:20])]
    check((built[7], built[11]))
    check((built[9], built[12], built[9], built[10]), 8, 2, dtype=torch.bfloat16)
    check((built[7], built[11]), softcap=2.0)


def test_two_masks_back_to_back():
    """Check that a mask's plan is not reused for another mask, or after its deletion."""
    for _ in range(3):
        for name in ("mp", "ee_isolated", "window"):
            check((every_pattern(144)[name](),))


def test_one_mask_for_a_batch():
    mask = every_pattern(100)["mp"]()
    tensors, _ = inputs((mask, mask), 4, 2, 16)
    one, many = (cpu_attention(*tensors, masks)[0] for masks in (mask, (mask, mask)))
    assert torch.equal(one, many)


@given(tables(), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.sampled_from([None, 2.0]))
def test_random_segment_tables(mask, heads, softcap):
    check((mask,), *heads, 8, softcap=softcap)


@settings(deadline=None, max_examples=25)
@given(tables(500, 500))
def test_random_segment_tables_bf16(mask):
    check((mask,), 2, 1, 8, torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant):
    def attend(query, key, value, masks):
        return checkpoint(cpu_attention, query, key, value, masks, use_reentrant=reentrant)

    for name in ("mp_isolated", "own_image_window", "causal"):
        check((every_pattern(283)[name](),), attend=attend)


def test_a_chain_under_recomputation_with_two_masks():
    """Recompute layers with different masks (Gemma: local and global)."""
    masks = [every_pattern(144)[name]() for name in ("own_image_window", "own_image_packed")]
    (query, key, value), grad = inputs(masks[:1], 4, 2, 16)

    def layers(state, run):
        for mask in (*masks, *masks):
            state = state + run(state, mask)
        return state

    def attend(state, mask):
        return cpu_attention(state, key, value, (mask,))[0]

    def recomputed(state, mask):
        return checkpoint(attend, state, mask, use_reentrant=False)

    found = [
        torch.autograd.grad(layers(query, run), (query, key, value), grad)
        for run in (attend, recomputed)
    ]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_autocast():
    mask = every_pattern(144)["mp"]()
    tensors, grad = inputs((mask,), 4, 2, 16)
    for softcap in (None, 2.0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = cpu_attention(*tensors, (mask,), softcap=softcap)
            assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
            inside = torch.autograd.grad(out, tensors, grad.bfloat16(), retain_graph=True)
        outside = torch.autograd.grad(out, tensors, grad.bfloat16())
        exact = [t.detach().bfloat16().double().requires_grad_() for t in tensors]
        expected, _ = reference_attention(*exact, mask.dense(), softcap=softcap)
        expected_gradients = torch.autograd.grad(expected, exact, grad.bfloat16().double())
        assert error(out, expected) <= BOUND[torch.bfloat16]
        for one, two, other in zip(inside, outside, expected_gradients, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, two)
            assert error(one, other) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("needed", ["q", "k", "v", "qv", "kv"])
def test_only_the_gradients_that_are_needed(needed):
    mask = every_pattern(144)["ee"]()
    tensors, grad = inputs((mask,), 4, 2, 16)
    expected = torch.autograd.grad(cpu_attention(*tensors, (mask,))[0], tensors, grad)
    for name, tensor in zip("qkv", tensors, strict=True):
        tensor.requires_grad_(name in needed)
    out, _ = cpu_attention(*tensors, (mask,))
    out.backward(grad)
    for name, tensor, one in zip("qkv", tensors, expected, strict=True):
        if name in needed:
            assert torch.equal(tensor.grad, one)
        else:
            assert tensor.grad is None


def test_any_strides():
    """Use expanded, sliced and transposed inputs; a gradient without strides, like a sum's."""
    mask = every_pattern(144)["own_image_window"]()
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(1, 4, 16, 300, generator=generator)
    query = wide.mT[:, :, 3:291:2].requires_grad_()
    key = torch.randn(1, 1, 144, 16, generator=generator).expand(1, 2, 144, 16).requires_grad_()
    value = torch.randn(144, 2, 32, generator=generator)[:, :, ::2].transpose(0, 1)[None]
    value.requires_grad_()
    plain = [t.detach().contiguous().requires_grad_() for t in (query, key, value)]
    found, expected = (
        torch.autograd.grad(cpu_attention(*tensors, (mask,))[0].sum(), tensors)
        for tensors in ((query, key, value), plain)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_output_used_twice():
    mask = every_pattern(100)["mp"]()
    tensors, grad = inputs((mask,), 4, 2, 16)
    out, lse = cpu_attention(*tensors, (mask,))
    twice = torch.autograd.grad((out * 2 + out * lse[..., None].exp().clamp(max=1) * 0).sum(),
                                tensors)  # fmt: skip
    once = torch.autograd.grad(cpu_attention(*tensors, (mask,))[0].sum(), tensors)
    for one, other in zip(twice, once, strict=True):
        torch.testing.assert_close(one, 2 * other)


def test_gradients_of_gradients_are_refused():
    mask = patterns.causal(20)
    tensors, _ = inputs((mask,), 2, 2, 8)
    out, _ = cpu_attention(*tensors, (mask,))
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_empty_rows():
    """Use text before the first image: output 0, LSE -inf, no gradient, no NaN."""
    mask = patterns.cross_images(200, [120, 150], [30, 40])
    tensors, grad = inputs((mask,), 4, 2, 16)
    out, lse = cpu_attention(*tensors, (mask,))
    assert not out[:, :, :120].any()
    assert (lse[:, :, :120] == -math.inf).all() and lse[:, :, 120:].isfinite().all()
    gradients = torch.autograd.grad(out, tensors, grad)
    assert not gradients[0][:, :, :120].any()
    assert all(g.isfinite().all() for g in gradients)


def test_empty_rows_within_a_block():
    """Mix rows with and without visible keys in one masked part."""
    dense = torch.zeros(40, 40, dtype=torch.bool)
    table = []
    for start in range(0, 40, 2):
        table.append([start, 1, 0, start + 3, 0, 0, 0, 0, 0, 0])
        table.append([start + 1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
        dense[start, : start + 3] = True
    mask = AttentionMask(table, [[0, 1]], 40, 40)
    assert torch.equal(mask.dense(), dense)
    for dtype in (torch.float32, torch.bfloat16):
        check((mask,), dtype=dtype)
        check((mask,), dtype=dtype, softcap=2.0)


def test_empty_attention():
    for rows, keys in ((0, 5), (5, 0), (0, 0), (5, 5)):
        mask = AttentionMask(
            [[0, 0, 0, keys, 0, 0, 0, 0, 0, 0]], [[0, 1]], rows, keys
        ) if rows and keys else table(0, rows, keys)
        check((mask,))


def leak(mask, row, dtype, softcap):
    """Return the largest gradient of one output row with respect to each key and value, per key."""
    tensors, _ = inputs((mask,), 4, 2, 16, dtype)
    out, _ = cpu_attention(*tensors, (mask,), softcap=softcap)
    _, dk, dv = torch.autograd.grad(out[:, :, row].float().square().sum(), tensors)
    return dk.abs().amax(dim=(0, 1, 3)), dv.abs().amax(dim=(0, 1, 3))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_leaks(dtype, softcap):
    """Check that the gradient with respect to an invisible key is exactly 0."""
    spans = [Span(10, 40), Span(50, 80), Span(90, 110, 2), Span(130, 150), Span(150, 190)]
    documents = [120, 80]
    for isolate in (False, True):
        mask = patterns.packed(documents, spans, isolate=isolate)
        visible = mask.dense()
        for row in (5, 20, 45, 60, 95, 115, 125, 135, 155, 195):
            dk, dv = leak(mask, row, dtype, softcap)
            assert not dk[~visible[row]].any() and not dv[~visible[row]].any()
            assert (dv[visible[row]] > 0).all()
            if row >= 120:
                assert not dv[:120].any()  # another document
            else:
                assert not dv[120:].any()
        image = leak(mask, 60, dtype, softcap)[1]
        assert not image[80:].any()  # later text
        assert image[10:40].any() != isolate  # the other image
        assert leak(mask, 45, dtype, softcap)[1][10:40].all()  # text after an image sees it


def test_sources_that_rows_must_not_see_change_nothing():
    """Check that values of other documents do not enter, not even as 0 times infinity."""
    mask = patterns.documents([700, 900])
    (query, key, value), _ = inputs((mask,), 2, 1, 8)
    expected = cpu_attention(query, key, value, (mask,))[0]
    with torch.no_grad():
        value[:, :, 700:] = math.inf
    found = cpu_attention(query, key, value, (mask,))[0]
    assert torch.equal(found[:, :, :700], expected[:, :, :700])


def test_context_parallel_rows():
    """Compare rows of one rank among all keys with the same rows of the whole."""
    whole = every_pattern(283)["mp"]()
    (query, key, value), _ = inputs((whole,), 4, 2, 16)
    expected, expected_lse = cpu_attention(query, key, value, (whole,))
    ranges = [(40, 90), (200, 283)]
    rows = torch.cat([torch.arange(*r) for r in ranges])
    out, lse = cpu_attention(query[:, :, rows], key, value, (whole.select_queries(ranges),))
    torch.testing.assert_close(out, expected[:, :, rows])
    torch.testing.assert_close(lse, expected_lse[:, :, rows])


def test_refusals():
    mask = patterns.causal(10)
    (query, key, value), _ = inputs((mask,), 4, 2, 8)
    for arguments, message in (
        ((query[0], key, value), r"expected \(B, H, T, D\)"),
        ((query[:, :3], key, value), r"multiple of key heads, got query \(1, 3, "),
        ((query, key[..., :4], value), "head dim must agree"),
        ((query, key, value[:, :, :5]), "of the same tokens"),
        ((query, key.bfloat16(), value), "one floating dtype"),
        ((query.long(), key.long(), value.long()), "one floating dtype"),
        ((query.to("meta"), key.to("meta"), value.to("meta")), "must be on the CPU, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu_attention(*arguments, (mask,))
    with pytest.raises(ModelError, match="2 masks for a batch of 1"):
        cpu_attention(query, key, value, (mask, mask))
    with pytest.raises(ModelError, match="the tensors have 10 and 10"):
        cpu_attention(query, key, value, (patterns.causal(11),))
