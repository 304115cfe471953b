"""Attention over a part of the keys: the partial results that distributed attention sends and
merges.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys, ``D`` head
dim.
"""

from __future__ import annotations

import torch


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys, in fp32 (LV-XAttn, Alg. 1, ``Rescale``, with
    one LSE in place of its m and l).

    Args:
        out, other_out: (B, H, Tq, D).
        lse, other_lse: (B, H, Tq) fp32; -inf for rows that see no key.

    Returns:
        (B, H, Tq, D) fp32 and (B, H, Tq) fp32.
    """
    merged = torch.logaddexp(lse, other_lse)
    # Rows that see no key in either part give -inf - (-inf); set their weights to 0.
    is_masked = merged == -torch.inf
    weight = (lse - merged).masked_fill_(is_masked, -torch.inf).exp_()
    other_weight = (other_lse - merged).masked_fill_(is_masked, -torch.inf).exp_()
    return out.float() * weight[..., None] + other_out.float() * other_weight[..., None], merged


def row_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return rowsum(dO * O), (B, H, Tq) fp32. Backward needs nothing else of the output."""
    return (grad_out.float() * out.float()).sum(dim=-1)


def output_like(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return a multiple of dO with the given ``delta``, to pass as O to kernels that read O only to
    compute rowsum(dO * O)."""
    largest = grad_out.abs().amax(dim=-1, keepdim=True).float()
    unit = grad_out.float() / largest.masked_fill(largest == 0, 1.0)
    length = (unit * unit).sum(dim=-1, keepdim=True)
    multiple = delta[..., None] / (largest * length).masked_fill(largest == 0, 1.0)
    return (unit * multiple).to(grad_out.dtype)
