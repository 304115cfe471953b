"""Padding of head dims that the kernels do not support with columns of zeros.

Zeros do not change scores, and the padded columns of the output are dropped. Vision towers have
heads of 88 or 72 columns, tiny models of 4 to 24, and latent attention (DeepSeek) has values that
are narrower than keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from raymm.kernels.flash.gpu.launch_configs import HEAD_DIM_MULTIPLE, SMALLEST_HEAD_DIM


def kernel_head_dim(head_dim: int, value_dim: int) -> int:
    """Return the columns of the padded tensors, for head dims D of keys and Dv of values."""
    most = max(head_dim, value_dim, SMALLEST_HEAD_DIM)
    return -(-most // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def widened(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pad a (..., D) tensor with columns of zeros to ``head_dim`` columns; differentiable."""
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def narrowed(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the first ``head_dim`` columns, as a view."""
    return tensor if tensor.shape[-1] == head_dim else tensor[..., :head_dim]
