"""Attention of a few rows among a few keys in plain torch operations, forward and backward:
what ATen's CPU kernel does not do (soft-capped scores, values of another width than keys).

Scores are held in fp32, (N, M, G, n, K); callers keep n and K small.
Legend: ``M`` key heads, ``G`` query heads per key head, ``n`` rows, ``K`` keys.
"""

from __future__ import annotations

import math

import torch


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (N, M * G, n, Dv) and LSE (N, M * G, n), fp32, of rows (N, M * G, n, D) among
    keys (N, M, K, D); ``bias`` (1, 1, n, K) is 0 or -inf. Rows that see nothing have output 0
    and LSE -inf.

    Args:
        query: (N, M * G, n, D).
        key: (N, M, K, D).
        value: (N, M, K, Dv).
        bias: (1, 1, n, K), 0 or -inf; None: everything is visible.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
    """
    scores, _ = _scores(_grouped(query, key), _wide(key), bias, scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    out = _product(weights, _wide(value))
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of rows, keys and values, fp32, from the whole rows' output and LSE.

    Args:
        grad_out: (N, M * G, n, Dv).
        query: (N, M * G, n, D).
        key: (N, M, K, D).
        value: (N, M, K, Dv).
        out: of the whole rows, (N, M * G, n, Dv).
        lse: of the whole rows, (N, M * G, n).
        bias: (1, 1, n, K), 0 or -inf; None: everything is visible.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
    """
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
    """(N, M, G, n, K) scores, and the slope of the soft cap at each."""
    scores, slope = _product(rows * scale, keys.mT), None
    if softcap is not None:
        tanh = scores.div_(softcap).tanh_()
        slope = tanh.square().neg_().add_(1)
        scores = tanh.mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    return scores, slope


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(N, M, G, n, X) @ (N, M, X, Y), as one product of G n rows per key head."""
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _grouped(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _wide(rows).unflatten(1, (key.shape[1], -1))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)
