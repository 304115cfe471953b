"""Attention as an operator for compiled graphs equals attention with mask objects."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.attention import attention
from raymm.kernels.mask import patterns
from raymm.kernels.masked_operator import (
    _backward,
    _forward,
    mask_table,
    masked_attention,
    table_masks,
)

LENGTH = 57


def tensors(dtype=torch.float32, batch=2, length=LENGTH, dim=16, value_dim=16):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, length, heads, width, generator=generator)
        .to(dtype).transpose(1, 2).requires_grad_()
        for heads, width in ((4, dim), (2, dim), (2, value_dim))
    )


def masks_of(name):
    return every_pattern(LENGTH)[name](), patterns.causal(LENGTH)


def outcome(attend, dtype, **sizes):
    """Return output (B, Tq, Hq, D) and gradients."""
    inputs = tensors(dtype, **sizes)
    out = attend(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@pytest.mark.parametrize("name", ["causal", "ee", "mp_window", "own_image"])
def test_tables_keep_masks(name):
    masks = masks_of(name)
    restored = table_masks(mask_table(masks))
    assert [m.shape for m in restored] == [m.shape for m in masks]
    assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(masks, restored, strict=True))
    assert table_masks(mask_table(masks).clone()) is restored, "layers do not share plans"
    assert len(table_masks(mask_table(masks[:1]))) == 1
    same = mask_table((masks[0],) * 5)
    assert len(same) == len(mask_table(masks[:1])) + 4, "equal masks are stored twice"
    assert len(set(map(id, table_masks(same)))) == 1


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 2.0}, {"window": 5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "ee", "own_image"])
def test_the_operator_equals_attention(name, dtype, options):
    masks = masks_of(name)
    narrowed = [m.windowed(options["window"]) for m in masks] if "window" in options else masks
    plain = {key: value for key, value in options.items() if key != "window"}
    expected = outcome(lambda *t: attention(*t, narrowed, **plain)[0].transpose(1, 2), dtype)
    table = mask_table(masks)
    found = outcome(lambda *t: masked_attention(*t, table, **options), dtype)
    assert all(map(torch.equal, found, expected))


def test_values_of_another_width_and_autocast():
    masks = masks_of("causal")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (
            outcome(attend, torch.float32, value_dim=8) for attend in (
                lambda *t: attention(*t, masks)[0].transpose(1, 2).float(),
                lambda *t: masked_attention(*t, mask_table(masks)).float(),
            )
        )
    assert all(map(torch.equal, found, expected))


def test_fake_and_gradient_of_the_operator():
    """Let torch check schemas, shapes, strides, and the autograd formula under tracing."""
    inputs = [t.detach().transpose(1, 2).requires_grad_() for t in tensors()]
    table = mask_table(masks_of("own_image"))
    torch.library.opcheck(_forward, (*inputs, table, 5, None, None))
    with torch.no_grad():
        out, lse = _forward(*inputs, table, None, 0.3, None)
        given = [t.detach() for t in inputs]
        arguments = (torch.ones_like(out), *given, out, lse, table, None, 0.3, None)
        torch.library.opcheck(_backward, arguments)
