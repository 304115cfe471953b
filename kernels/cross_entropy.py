"""Token cross entropy as a sum, so that any split of a step adds up to the same loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross entropies over tokens, in fp32.

    Args:
        logits: (N, V), any floating dtype.
        targets: (N,) int64, no ignored entries. N may be 0.

    Returns:
        Scalar fp32: the sum over N of -log softmax(logits)[target].
    """
    return F.cross_entropy(logits.float(), targets, reduction="sum")
