"""The dense oracle equals torch's attention, and a loop where torch has no equivalent."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from raymm.kernels.flash.reference import reference_attention


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, length, 4, generator=generator, dtype=torch.float64)
        for heads, length in ((4, 5), (2, 7), (2, 7))
    ]


def test_output_and_gradients_equal_those_of_torch():
    given = [t.requires_grad_() for t in tensors()]
    visible = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    visible[:, 0] = True
    out, _ = reference_attention(*given, visible, scale=0.3)
    expected = F.scaled_dot_product_attention(
        *given, attn_mask=visible, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out.sin().sum(), given),
        torch.autograd.grad(expected.sin().sum(), given), strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_softcap_and_lse_equal_a_loop():
    query, key, value = tensors()
    visible = torch.ones(2, 5, 7, dtype=torch.bool).tril()
    out, lse = reference_attention(query, key, value, visible, softcap=1.5)
    for b, h, q in ((0, 0, 0), (1, 3, 4), (0, 2, 2)):
        keys = range(q + 1)
        dots = [float(query[b, h, q] @ key[b, h // 2, k]) / 2 for k in keys]
        weights = [math.exp(1.5 * math.tanh(dot / 1.5)) for dot in dots]
        assert math.isclose(float(lse[b, h, q]), math.log(sum(weights)), rel_tol=1e-12)
        expected = sum(w * value[b, h // 2, k] for w, k in zip(weights, keys, strict=True))
        torch.testing.assert_close(out[b, h, q], expected / sum(weights))


def test_rows_that_see_no_key_have_no_output_and_no_gradient():
    given = [t.requires_grad_() for t in tensors()]
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[2] = False
    out, lse = reference_attention(*given, visible)
    assert not out[:, :, 2].any() and (lse[:, :, 2] == -math.inf).all()
    (gradient, *_) = torch.autograd.grad(out.sum(), given)
    assert not gradient[:, :, 2].any() and gradient.isfinite().all()
