"""Call of Triton attention, and its errors against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raymm.kernels.mask.mask import AttentionMask

NAMES = ("out", "lse", "query", "key", "value")
# Relative to a tensor's own norm. Triton's interpreter truncates fp32 to bf16 instead of rounding,
# which doubles the error of every conversion: a GPU's error is about half of this bound.
BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """Call of `triton_attention`.

    Attributes:
        masks: one per sequence of the batch; equal objects stay one object.
        value_dim: Dv; the head dim by default.
        blocks: (block_q, block_k) of every kernel instead of the table's; multiples of 16.
        descriptors: True to load tiles by tensor descriptors; requires blocks.
        unordered: True to sum up the query's gradient in any order.
    """

    masks: tuple[AttentionMask, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 32
    dtype: str = "float32"
    value_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    processors: int | None = None
    blocks: tuple[int, int] | None = None
    descriptors: bool = False
    unordered: bool = False
    seed: int = 0


def inputs(case: Case) -> list[torch.Tensor]:
    """Return normally distributed query, key, value and output gradient."""
    generator = torch.Generator().manual_seed(case.seed)
    n_queries, n_keys = case.masks[0].shape
    queries, keys = (case.heads[0], n_queries), (case.heads[1], n_keys)
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    shapes = [
        (*queries, case.head_dim), (*keys, case.head_dim), (*keys, value_dim),
        (*queries, value_dim),
    ]
    dtype = getattr(torch, case.dtype)
    return [
        torch.randn(len(case.masks), *shape, generator=generator).to(dtype) for shape in shapes
    ]


def run(case: Case, device: str) -> list[torch.Tensor]:
    """Return output, LSE and the three gradients, computed on a device."""
    from raymm.kernels.flash.gpu.attention import triton_attention

    *leaves, grad_out = (t.to(device) for t in inputs(case))
    leaves = [t.requires_grad_() for t in leaves]
    out, lse = triton_attention(*leaves, case.masks, **options(case))
    grads = torch.autograd.grad(out, leaves, grad_out)
    return [t.detach() for t in (out, lse, *grads)]


def options(case: Case) -> dict[str, Any]:
    """Return keyword arguments of the call."""
    from raymm.kernels.flash.gpu.launch_configs import AttentionConfig, KernelConfig, Launch

    config = None
    if case.blocks is not None:
        kernel = KernelConfig(*case.blocks, warps=4, stages=1, precision="ieee",
                              descriptors=case.descriptors, unordered=case.unordered)  # fmt: skip
        config = AttentionConfig(kernel, kernel, kernel)
    return {
        "scale": case.scale,
        "softcap": case.softcap,
        "launch": Launch(case.processors, config, case.unordered),
    }


def expected(case: Case, device: str) -> list[torch.Tensor]:
    """Return the same tensors from the oracle, in float64."""
    from raymm.kernels.flash.reference import reference_attention

    *leaves, grad_out = (t.to(device) for t in inputs(case))
    leaves = [t.double().requires_grad_() for t in leaves]
    visible = torch.stack([mask.dense() for mask in case.masks]).to(device)
    out, lse = reference_attention(*leaves, visible, scale=case.scale, softcap=case.softcap)
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    return [t.detach() for t in (out, lse, *grads)]


def errors(
    case: Case, device: str, actual: list[torch.Tensor] | None = None
) -> dict[str, float]:
    """Return the relative error of each tensor against the oracle, by norms.

    Args:
        actual: result of :func:`run`; None to compute it.

    Raises:
        AssertionError: the rows without visible keys differ from the oracle's, or have non-zero
            results.
    """
    found = dict(zip(NAMES, actual or run(case, device), strict=True))
    exact = dict(zip(NAMES, expected(case, device), strict=True))
    unseen = torch.isneginf(exact["lse"])
    assert torch.equal(torch.isneginf(found["lse"]), unseen), "rows that see nothing"
    assert not found["out"][unseen].any() and not found["query"][unseen].any()
    unread = (exact["value"] == 0).all(-1)
    assert not found["key"][unread].any() and not found["value"][unread].any()
    found["lse"], exact["lse"] = found["lse"][~unseen], exact["lse"][~unseen]
    return {name: _error(found[name].double(), exact[name]) for name in NAMES}


def part_errors(case: Case, device: str, cut: int) -> dict[str, float]:
    """Return :func:`errors` of merged attention over the keys before ``cut`` and from ``cut`` on.

    Attention over several processes does the same.

    Raises:
        AssertionError: the rows without visible keys differ from the oracle's, or gradients are not
            fp32.
    """
    from raymm.kernels.context_parallel.call import merge_partials, output_like, row_delta
    from raymm.kernels.flash.gpu.attention import triton_backward, triton_forward
    from raymm.kernels.flash.operands import BackwardTensors

    query, key, value, grad_out = (t.to(device) for t in inputs(case))
    scale = case.head_dim**-0.5
    parts = []
    for start, stop in ((0, cut), (cut, key.shape[2])):
        masks = tuple(mask.select_keys([(start, stop)]) for mask in case.masks)
        parts.append((key[:, :, start:stop], value[:, :, start:stop], masks))
    first, second = (triton_forward(query, *part, scale, case.softcap) for part in parts)
    out, lse = merge_partials(*first, *second)
    delta = row_delta(grad_out, out)
    like = output_like(grad_out, delta)
    shares = [
        triton_backward(
            BackwardTensors(grad_out, query, k, v, like, lse), masks, scale, case.softcap
        )
        for k, v, masks in parts
    ]
    assert all(gradient.dtype == torch.float32 for share in shares for gradient in share)
    dq = shares[0][0] + shares[1][0]
    dk, dv = (torch.cat([share[i] for share in shares], dim=2) for i in (1, 2))
    return errors(case, device, [out, lse, dq, dk, dv])


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error; the largest element if the oracle's tensor is zero.

    Gradients of scores of a single key are zero.
    """
    assert actual.shape == exact.shape and actual.isfinite().all()
    norm = exact.norm().item()
    if norm > 1e-9:
        return (actual - exact).norm().item() / norm
    return actual.abs().max().item() if actual.numel() else 0.0
