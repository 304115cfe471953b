"""Attention of tensors on a CPU equals dense float64 attention, and rejects what does not fit."""

from __future__ import annotations

import pytest
import torch

from raymm.errors import ModelError
from raymm.kernels.attention import attention
from raymm.kernels.flash.reference import reference_attention
from raymm.kernels.mask.patterns import causal, documents, full


def tensors(batch: int = 2, rows: int = 40, value_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, 4, rows, 16), (batch, 2, rows, 16), (batch, 2, rows, value_dim)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0}])
def test_each_sequence_has_its_mask(options, value_dim):
    query, key, value = tensors(value_dim=value_dim)
    masks = causal(40), documents([15, 25])
    out, lse = attention(query, key, value, masks, **options)
    visible = torch.stack([mask.dense() for mask in masks])
    expected, expected_lse = reference_attention(query, key, value, visible, **options)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-5)
    assert lse.dtype == torch.float32


def test_one_mask_serves_all_sequences():
    given = tensors()
    assert torch.equal(attention(*given, causal(40))[0], attention(*given, [causal(40)] * 2)[0])


def test_arguments_that_do_not_fit_are_rejected():
    query, key, value = tensors()
    with pytest.raises(ModelError, match="41"):
        attention(query, key, value, full(41, 40))
    with pytest.raises(ValueError, match="softcap must be positive, got 0"):
        attention(query, key, value, causal(40), softcap=0.0)
