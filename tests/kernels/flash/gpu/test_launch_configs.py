"""Launch configurations by head dim and dtype, and the scalar arguments of kernels."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from raymm.kernels.flash.gpu.launch_configs import (
    DTYPES,
    KernelConfig,
    attention_config,
    constants,
    key_passes,
    padded_head_dim,
    scales,
    statistics_rows,
)


def test_every_head_dim_has_a_configuration_that_covers_it():
    for head_dim, dtype, softcap, descriptors in product(
        range(1, 513, 7), DTYPES, (False, True), (False, True)
    ):
        columns = padded_head_dim(head_dim)
        assert head_dim <= columns < 2 * head_dim or columns == 1
        if columns < 32:  # padded before
            continue
        config = attention_config(head_dim, dtype, softcap=softcap, descriptors=descriptors)
        for kernel in (config.forward, config.backward_query, config.backward_key):
            assert kernel.block_q % 16 == kernel.block_k % 16 == 0
            assert not kernel.descriptors or (descriptors and dtype != torch.float32)
        assert statistics_rows(head_dim) * columns <= 1 << 14


def test_passes_cover_both_gradients_once():
    for two_passes in (False, True):
        config = KernelConfig(16, 16, 4, 1, two_passes=two_passes)
        passes = key_passes(config)
        assert len(passes) == 1 + two_passes
        assert sum(p["FOR_KEY"] for p in passes) == sum(p["FOR_VALUE"] for p in passes) == 1
        assert not any(p["FOR_QUERY"] for p in passes)
    arguments = constants(config, 40, bits=True, softcap=False, interpreted=True)
    assert (arguments["D"], arguments["BLOCK_D"], arguments["UPCAST"]) == (40, 64, True)


def test_scales_are_in_base_two():
    """Compare exp2 with the kernels' factors to the exponential of the capped score."""
    for score, softcap in ((1.7, None), (-0.4, 2.0)):
        inner, multiplier, scale = scales(64, 0.3, softcap)
        assert scale == 0.3
        capped = score if softcap is None else math.tanh(inner / (2 * math.log2(math.e)) * score)
        expected = scale * score
        if softcap is not None:
            expected = softcap * math.tanh(expected / softcap)
        assert 2 ** (capped * multiplier) == pytest.approx(math.exp(expected))
    assert scales(64, None, None)[2] == 0.125


def test_unsupported_values_are_named():
    with pytest.raises(ValueError, match="head dim must be at most 512, got 520"):
        attention_config(520, torch.bfloat16)
    with pytest.raises(ValueError, match="float64"):
        attention_config(64, torch.float64)
    with pytest.raises(ValueError, match="scale must be positive, got -1"):
        scales(64, -1.0, None)
    with pytest.raises(ValueError, match="softcap must be positive or None, got 0"):
        scales(64, None, 0.0)


def test_order_is_kept_if_it_is_free():
    for head_dim, more in ((256, {}), (32, {}), (128, {"softcap": True})):
        ordered, either = (
            attention_config(head_dim, torch.bfloat16, descriptors=True, unordered=u, **more)
            for u in (False, True)
        )
        assert ordered == either
    for dtype, descriptors in ((torch.float32, True), (torch.bfloat16, False)):
        config = attention_config(128, dtype, descriptors=descriptors, unordered=True)
        assert not config.backward_key.unordered
