"""Quantisation of frozen weights.

- int8: a byte per element, and a scale per output (weight-only int8, with the codes, scales and
  products of ``torchao``'s ``Int8WeightOnlyConfig``).
- int4: half a byte per element, and a scale per output and :data:`GROUP` inputs (with the numbers
  of ``torchao``'s ``IntxWeightOnlyConfig``). Codes of neighbouring inputs share a byte; the even
  input is in the lower half.
"""

from __future__ import annotations

from typing import Any

import torch

SCALE = "weight_scale"
"""Name of the parameter with the scales, next to ``weight``, which holds the codes."""
INT8, INT4 = "int8", "int4"
GROUP = 32
"""Number of inputs that share a scale, in int4."""
PACKED = 2
"""Number of codes per byte, in int4."""
# Codes are symmetric around zero, except for the lowest.
_RANGES = {INT8: (-128, 127), INT4: (-8, 7)}
_LEAST_SCALE = torch.finfo(torch.float32).eps


def quantise(matrix: torch.Tensor, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes of a matrix, and their scales.

    Args:
        matrix: (out, in), floating point; for int4, in is a multiple of :data:`GROUP`.

    Returns:
        (out, in) int8 and (out,) fp32; or (out, in / 2) int8 and (out, in / GROUP) fp32.
    """
    values = matrix.detach().float()
    out, inner = values.shape
    if values.is_meta:
        if base == INT8:
            return values.to(torch.int8), values.new_empty(out)
        packed = values.new_empty(out, inner // PACKED, dtype=torch.int8)
        return packed, values.new_empty(out, inner // GROUP)
    groups = values.view(out, -1, inner if base == INT8 else GROUP)
    lowest, highest = _RANGES[base]
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = torch.maximum(-low, high) / ((highest - lowest) / 2)
    scales = scales.clamp(min=_LEAST_SCALE)
    codes = (groups * (1 / scales)[..., None]).round().clamp(lowest, highest)
    codes = codes.to(torch.int8).view(out, inner)
    if base == INT8:
        return codes, scales[:, 0]
    return (codes[:, ::PACKED] & 15) | (codes[:, 1::PACKED] << 4), scales


def dequantised(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of codes, (out, in)."""
    if scales.dim() == 1:
        return codes.to(dtype) * scales.to(dtype)[:, None]
    # Lower half with sign extension, then the upper half.
    pairs = torch.stack([(codes << 4) >> 4, codes >> 4], dim=2)
    numbers = pairs.to(dtype).view(len(codes), -1, GROUP) * scales.to(dtype)[..., None]
    return numbers.view(len(codes), -1)


class _Product(torch.autograd.Function):
    """Product with quantised weights, whose codes are converted to the compute dtype in forward and
    backward only, so that autograd keeps only the codes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        if scales.dim() > 1:
            return hidden @ dequantised(codes, scales, hidden.dtype).T
        return (hidden @ codes.to(hidden.dtype).T) * scales.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (codes, scales), (gradient,) = ctx.saved_tensors, gradients
        if scales.dim() > 1:
            return gradient @ dequantised(codes, scales, gradient.dtype), None, None
        return (gradient * scales.to(gradient.dtype)) @ codes.to(gradient.dtype), None, None


def quantised_product(
    hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by a quantised weight: (..., in) -> (..., out), in autocast's dtype if enabled. Only
    ``hidden`` gets a gradient."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _Product.apply(hidden, codes, scales)
