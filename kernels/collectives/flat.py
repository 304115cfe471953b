"""Collectives on flat tensors whose shares are alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Their names since torch 2.13, where the former ones warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shares(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All processes' shares one after another: (n,) -> (n * processes,)."""
    whole = share.new_empty(share.numel() * group.size())
    if share.numel():
        _all_gather(whole, share, group=group)
    return whole


def scatter_sum(
    flat: torch.Tensor, share: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """This process's share of the sum over processes.

    Args:
        flat: (N,), of the same N everywhere.
        share: elements of a share; ``share * processes >= N``.
        group: whose members all call it.

    Returns:
        (share,): elements from ``share * rank`` on, filled up with zeros.
    """
    filled = F.pad(flat, (0, share * group.size() - flat.numel()))
    mine = flat.new_empty(share)
    _reduce_scatter(mine, filled, group=group)
    return mine
