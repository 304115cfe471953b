"""Attention and FlexAttention without a GPU: masks, BlockMasks, the oracle's rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import Heads


@pytest.mark.parametrize("pattern", attention.PATTERNS)
@pytest.mark.parametrize("length", [64, 500, 1000])
def test_flex_gets_the_same_mask(pattern, length):
    mask = attention.build_mask(pattern, length)
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    zero = torch.tensor(0)
    dense = mask.dense()
    assert mask.area() == int(dense.sum())
    flex = attention.flex_block_mask(pattern, mask, "cpu")
    assert torch.equal(flex.mask_mod(zero, zero, q, k), dense)
    # Blocks: 1 for computed ones, including full ones without a test.
    blocks = flex.to_dense()[0, 0].bool()
    whole = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length]
    assert not (dense & ~whole).any()
    full = flex.full_kv_num_blocks[0, 0]
    for row, count in enumerate(full.tolist()):
        for column in flex.full_kv_indices[0, 0, row, :count].tolist():
            tile = dense[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            assert tile.all()


def test_masks_of_the_benchmark_are_of_use():
    masks = {name: attention.build_mask(name, 8192) for name in attention.PATTERNS}
    causal = masks["causal"].area()
    shares = {name: mask.area() / causal for name, mask in masks.items()}
    assert 0.5 < shares["ee"] < 1.5 and all(0.1 < shares[name] < 0.5 for name in ("mp", "gemma"))
    assert masks["ee"].needs_bits and masks["mp"].needs_bits
    assert sum(attention.document_lengths(8192)) == 8192


def test_sampled_rows_of_the_oracle():
    """Compare rows with the full oracle; errors are those of the worst rows."""
    from raymm.kernels.flash.reference import reference_attention

    shape = Heads(4, 2, 16)
    mask = attention.build_mask("mp", 64)
    tensors = [torch.randn(1, h, 64, 16, dtype=torch.float64) for h in (4, 2, 2, 4)]
    leaf = tensors[0].clone().requires_grad_()
    whole, _ = reference_attention(leaf, *tensors[1:3], mask.dense())
    (grad,) = torch.autograd.grad(whole, leaf, tensors[3])
    out, grad_rows = attention.oracle_rows(mask, tensors, slice(40, 56), shape)
    torch.testing.assert_close(out, whole[:, :2, 40:56])
    torch.testing.assert_close(grad_rows, grad[:, :2, 40:56])
    outputs = [whole, grad, *tensors[1:3]]
    assert max(attention.compare(mask, tensors, {"raymm": outputs}, shape).values()) < 1e-6
    wrong = {"raymm": [whole * 1.1, *outputs[1:]], "flex": outputs}
    found = attention.compare(mask, tensors, wrong, shape)
    assert found["out_rows"] == pytest.approx(0.1, rel=1e-3) == found["out_to_flex"]
    broken = {"raymm": [whole * torch.nan, *outputs[1:]]}
    assert not attention.compare(mask, tensors, broken, shape)["out_rows"] <= 1
