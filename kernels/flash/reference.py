"""Dense float64 attention: the oracle of every attention path. Slow and obvious.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys,
``D`` head dim.
"""

from __future__ import annotations

import math

import torch


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(softcap(scale * Q K^T) where visible) V, differentiable and in float64.

    Args:
        query: (B, Hq, Tq, D).
        key, value: (B, Hk, Tk, D); Hq is a multiple of Hk.
        visible: (B, Tq, Tk) or (Tq, Tk) bool.
        scale: default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).

    Returns:
        Output (B, Hq, Tq, D) and LSE (B, Hq, Tq), float64. Rows that see no key have output 0 and
        LSE -inf, and give no gradient.
    """
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = (visible if visible.dim() == 3 else visible[None]).to(scores.device)[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    has_keys = visible.any(dim=-1, keepdim=True)
    # Rows that see no key get scores of 0 before the softmax and weights of 0 after it.
    weights = scores.masked_fill(~has_keys, 0.0).softmax(dim=-1).masked_fill(~visible, 0.0)
    return weights @ value, torch.logsumexp(scores, dim=-1)
