"""FlexAttention with raymm's masks."""

from __future__ import annotations

import torch

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.choice import flex
from raymm.kernels.choice.flex import flex_attention, padded_length
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.mask import patterns
from tests.kernels.choice.test_choice import tensors


def test_flex_gets_few_lengths(monkeypatch):
    """Count the shapes that would be compiled for 200 lengths; outputs keep their lengths."""
    shapes, real = set(), flex._function("cpu")

    def seen(query, key, value, **options):
        shapes.add((query.shape, key.shape))
        return real(query, key, value, **options)

    monkeypatch.setattr(flex, "_function", lambda device: seen)
    for length in (1, 100, 128, 129, 200, 300, 383):
        given, mask = tensors(length), patterns.causal(length)
        out, lse = flex_attention(*given, (mask,))
        expected = cpu_attention(*given, (mask,))
        torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=0)
        torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=0)
    assert len(shapes) == 3
    classes = {padded_length(length) for length in range(4097, 65537)}
    assert len(classes) == 16 and all(size % 128 == 0 for size in classes)
    assert all(length <= padded_length(length) <= max(1.25 * length, 128 + length)
               for length in range(1, 9000))


def test_rows_that_see_nothing_by_flex():
    mask = every_pattern(57)["own_image"]().select_keys([(0, 7)])
    query, key, value = tensors(57)
    given = query, key[:, :, :7], value[:, :, :7]
    out, lse = flex_attention(*given, (mask,))
    expected = cpu_attention(*given, (mask,))
    torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=0)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected[1]))
