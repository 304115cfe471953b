"""What distributed attention sends and merges: attention over a part of the keys.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys, ``D``
head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymm.kernels.mask.mask import AttentionMask


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from that over each, in fp32 (LV-XAttn, Alg. 1,
    ``Rescale``, with one LSE for its m and l).

    Args:
        out, other_out: (B, H, Tq, D).
        lse, other_lse: (B, H, Tq) fp32; -inf where nothing is seen.

    Returns:
        (B, H, Tq, D) fp32 and (B, H, Tq) fp32.
    """
    merged = torch.logaddexp(lse, other_lse)
    # Rows that see nothing in either have -inf - (-inf); their weights are zeros.
    nothing = merged == -torch.inf
    weight = (lse - merged).masked_fill_(nothing, -torch.inf).exp_()
    other = (other_lse - merged).masked_fill_(nothing, -torch.inf).exp_()
    return out.float() * weight[..., None] + other_out.float() * other[..., None], merged


def row_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dO * O), (B, H, Tq) fp32: all that a backward needs of the output."""
    return (grad_out.float() * out.float()).sum(dim=-1)


def partial_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: Sequence[AttentionMask],
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`raymm.kernels.attention.attention` without autograd, also of no keys at all.

    Args:
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        value: (B, Hk, Tk, Dv).
        masks: one per sequence of the batch.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
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
    """A part's share of dQ, dK and dV, in fp32.

    Args:
        lse: (B, Hq, Tq) of *all* keys that the rows see.
        delta: (B, Hq, Tq), :func:`row_delta` of the whole output.
        grad_out: gradient of the output, (B, Hq, Tq, Dv).
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        value: (B, Hk, Tk, Dv).
        masks: one per sequence of the batch.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
    """
    if not key.shape[2] or not query.shape[2]:
        return tuple(torch.zeros(t.shape, device=t.device) for t in (query, key, value))
    if query.device.type == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_backward as run
    else:
        from raymm.kernels.flash.gpu.attention import triton_backward as run
    out = output_like(grad_out, delta)
    gradients = run(grad_out, query, key, value, out, lse, tuple(masks), scale, softcap)
    return tuple(g for g in gradients if g is not None)  # all three were asked for


def output_like(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An output that gives ``delta``: kernels take O and use it for rowsum(dO * O) only, so
    the multiple of dO with that sum will do."""
    largest = grad_out.abs().amax(dim=-1, keepdim=True).float()
    unit = grad_out.float() / largest.masked_fill(largest == 0, 1.0)
    length = (unit * unit).sum(dim=-1, keepdim=True)
    multiple = delta[..., None] / (largest * length).masked_fill(largest == 0, 1.0)
    return (unit * multiple).to(grad_out.dtype)
