"""Collectives on flat tensors that are split into shards of equal size."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

# torch 2.13 renamed these functions; the former names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shares(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the shards of all processes: (n,) -> (n * processes,)."""
    full = share.new_empty(share.numel() * group.size())
    if share.numel():
        _all_gather(full, share, group=group)
    return full


def scatter_sum(
    flat: torch.Tensor, share: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Reduce-scatter: return this process's shard of the sum over processes.

    Args:
        flat: (N,), with the same N on all processes.
        share: elements of a shard; ``share * processes >= N``.
        group: all of its members must call this function.

    Returns:
        (share,): elements from ``share * rank`` on, padded with zeros.
    """
    filled = F.pad(flat, (0, share * group.size() - flat.numel()))
    shard = flat.new_empty(share)
    _reduce_scatter(shard, filled, group=group)
    return shard
