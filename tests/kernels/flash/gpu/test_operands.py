"""Tensors that the kernels can read, and those that they copy or reject."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.attention_case import Case, inputs
from raymm.kernels.mask import patterns


def _described(case: Case) -> None:
    from raymm.kernels.flash.gpu.operands import describable, source

    query = inputs(case)[0]
    assert describable(query, query) and not describable(query, query[:0])
    assert not describable(query[:1].expand(3, -1, -1, -1))
    by_token = query[:1].transpose(1, 2).contiguous().transpose(1, 2)
    described = source(by_token, 32, 64, descriptors=True)
    assert described.block_shape == [1, 1, 32, 64] and described.shape == list(by_token.shape)
    # A single sequence may have any batch stride; the descriptor covers all data.
    assert described.strides == [by_token.numel(), *by_token.stride()[1:]]
    assert source(query, 32, 64, descriptors=False) is query


def test_tensors_that_support_descriptors(triton_worker):
    triton_worker(_described, Case((patterns.causal(40),) * 2, (2, 1), 40))


def test_rows_that_are_dense_and_aligned_are_not_copied():
    pytest.importorskip("triton")
    from raymm.kernels.flash.gpu.operands import aligned, strides

    dense = torch.randn(2, 3, 5, 16)
    assert aligned(dense) is dense and strides(dense) == (30, 10, 2)
    by_token = dense.transpose(1, 2).contiguous().transpose(1, 2)
    assert aligned(by_token) is by_token
    for other in (dense[..., 1:9], dense.mT, torch.randn(2, 3, 5, 12)[..., :8]):
        copy = aligned(other)
        assert copy is not other and torch.equal(copy, other) and copy.stride(-1) == 1
    assert strides(dense[:1].as_strided((1, 3, 5, 16), (7, 80, 16, 1))) == (0, 10, 2)
