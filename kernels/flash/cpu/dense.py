"""Attention of a few rows over a few keys in plain torch operations, forward and backward. Covers
features that ATen's CPU kernel lacks: soft-capped scores, and values of another width than keys.

Scores are materialized in fp32, (N, M, G, n, K); callers keep n and K small. Legend: ``M`` key
heads, ``G`` query heads per key head, ``n`` rows, ``K`` keys.
"""

from __future__ import annotations

import math

import torch

from raymm.kernels.flash.operands import BackwardTensors


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (N, M * G, n, Dv) and LSE (N, M * G, n), fp32. Rows that see no key have output
    0 and LSE -inf.

    Args:
        query, key, value: (N, M * G, n, D), (N, M, K, D) and (N, M, K, Dv).
        bias: (1, 1, n, K), 0 or -inf; None if all pairs are visible.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None to leave them.
    """
    scores, _ = _scores(_grouped(query, key), _wide(key), bias, scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    out = _product(weights, _wide(value))
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(
    tensors: BackwardTensors, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, key and value in fp32. Shapes are those of :func:`forward`; output
    and LSE are those of the full rows."""
    grad_out, query, key, value, out, lse = tensors
    rows, keys, values = _grouped(query, key), _wide(key), _wide(value)
    grad_out, out = _grouped(grad_out, key), _grouped(out, key)
    lse = lse.unflatten(1, (key.shape[1], -1)).to(rows.dtype)
    scores, slope = _scores(rows, keys, bias, scale, softcap)
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad = _product(grad_out, values.mT).sub_(delta).mul_(weights)
    if slope is not None:
        grad.mul_(slope)
    grad.mul_(scale)
    grad_value = weights.flatten(2, 3).mT @ grad_out.flatten(2, 3)
    grad_key = grad.flatten(2, 3).mT @ rows.flatten(2, 3)
    return _product(grad, keys).flatten(1, 2), grad_key, grad_value


def _scores(
    rows: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return (N, M, G, n, K) scores, and the derivative of the softcap at each."""
    scores, slope = _product(rows * scale, keys.mT), None
    if softcap is not None:
        tanh = scores.div_(softcap).tanh_()
        slope = tanh.square().neg_().add_(1)
        scores = tanh.mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    return scores, slope


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute (N, M, G, n, X) @ (N, M, X, Y) as one product of G n rows per key head."""
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _grouped(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _wide(rows).unflatten(1, (key.shape[1], -1))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)
