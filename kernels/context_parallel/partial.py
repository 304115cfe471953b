"""Attention over a part of the keys: the partial results that distributed attention sends and
merges.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys, ``D`` head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymm.kernels.mask.mask import AttentionMask


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


def partial_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: Sequence[AttentionMask],
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`raymm.kernels.attention.attention` without autograd; the keys may be empty.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        masks: one per sequence of the batch.

    Returns:
        Output (B, Hq, Tq, Dv), and LSE (B, Hq, Tq) fp32.
    """
    if not key.shape[2] or not query.shape[2]:
        nothing = torch.full(query.shape[:3], -torch.inf, device=query.device)
        return query.new_zeros(*query.shape[:3], value.shape[3]), nothing
    if query.device.type == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_forward as run
    else:
        from raymm.kernels.flash.gpu.attention import triton_forward as run
    out, lse = run(query, key, value, tuple(masks), scale, softcap)
    return out, lse.float()


def partial_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    masks: Sequence[AttentionMask],
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the contribution of a part of the keys to dQ, dK and dV, in fp32.

    Args:
        grad_out: gradient of the output, (B, Hq, Tq, Dv).
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        lse: (B, Hq, Tq) over *all* keys that the rows see.
        delta: (B, Hq, Tq), :func:`row_delta` of the full output.
        masks: one per sequence of the batch.
    """
    if not key.shape[2] or not query.shape[2]:
        return tuple(torch.zeros(t.shape, device=t.device) for t in (query, key, value))
    if query.device.type == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_backward as run
    else:
        from raymm.kernels.flash.gpu.attention import triton_backward as run
    out = output_like(grad_out, delta)
    gradients = run(grad_out, query, key, value, out, lse, tuple(masks), scale, softcap)
    return tuple(g for g in gradients if g is not None)  # none is None: all three are requested


def output_like(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return a multiple of dO with the given ``delta``, to pass as O to kernels that read O only to
    compute rowsum(dO * O)."""
    largest = grad_out.abs().amax(dim=-1, keepdim=True).float()
    unit = grad_out.float() / largest.masked_fill(largest == 0, 1.0)
    length = (unit * unit).sum(dim=-1, keepdim=True)
    multiple = delta[..., None] / (largest * length).masked_fill(largest == 0, 1.0)
    return (unit * multiple).to(grad_out.dtype)
