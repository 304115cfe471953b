"""Frozen weights of a byte per element, with a scale per output (weight-only int8, with the codes,
scales and products of ``torchao``'s ``Int8WeightOnlyConfig``)."""

from __future__ import annotations

from typing import Any

import torch

SCALE = "weight_scale"
"""Name of the scales' parameter, beside ``weight``, which holds the codes."""
# Codes are symmetric to zero but for the lowest.
_LOWEST, _HIGHEST = -128, 127
_LEAST_SCALE = torch.finfo(torch.float32).eps


def quantise(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of a matrix, and what they are multiples of.

    Args:
        matrix: (out, in), floating point.

    Returns:
        (out, in) int8, and (out,) fp32.
    """
    values = matrix.detach().float()
    if values.is_meta:
        return values.to(torch.int8), values.new_empty(len(values))
    low, high = values.amin(dim=1).clamp(max=0), values.amax(dim=1).clamp(min=0)
    scales = torch.maximum(-low, high) / ((_HIGHEST - _LOWEST) / 2)
    scales = scales.clamp(min=_LEAST_SCALE)
    codes = (values * (1 / scales)[:, None]).round().clamp(_LOWEST, _HIGHEST)
    return codes.to(torch.int8), scales


class _Product(torch.autograd.Function):
    """Codes become numbers of the compute dtype for the length of a product, forward and backward:
    autograd keeps the codes alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        return (hidden @ codes.to(hidden.dtype).T) * scales.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (codes, scales), (gradient,) = ctx.saved_tensors, gradients
        return (gradient * scales.to(gradient.dtype)) @ codes.to(gradient.dtype), None, None


def quantised_product(
    hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """(..., in) -> (..., out), in autocast's dtype where there is one; a gradient goes to
    ``hidden`` alone.

    Args:
        hidden: floating point.
        codes: (out, in) int8.
        scales: (out,) fp32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _Product.apply(hidden, codes, scales)
