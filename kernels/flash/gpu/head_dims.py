"""Head dims that the kernels do not have, by columns of zeros: they add nothing to a score, and
what they make of values is not read.

Vision towers have heads of 88 or 72 columns, tiny models of 4 to 24, latent attention (DeepSeek's)
values that are narrower than keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from raymm.kernels.flash.gpu.launch_configs import HEAD_DIM_MULTIPLE, SMALLEST_HEAD_DIM


def kernel_head_dim(head_dim: int, value_dim: int) -> int:
    """Columns of the tensors that the kernels are given.

    Args:
        head_dim: D, of query and key.
        value_dim: Dv, of the values.
    """
    most = max(head_dim, value_dim, SMALLEST_HEAD_DIM)
    return -(-most // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def widened(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The tensor with columns of zeros behind its own, differentiable; itself if it has them all.

    Args:
        tensor: (..., D).
        head_dim: columns of the result, at least D.
    """
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def narrowed(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The first columns, as a view; the tensor itself if it has no others."""
    return tensor if tensor.shape[-1] == head_dim else tensor[..., :head_dim]
