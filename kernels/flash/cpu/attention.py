"""Attention on CPUs for any :class:`AttentionMask`, forward and backward.

Blocks of query rows run ATen's CPU flash attention on exactly the keys that they see. A mask is
made only for parts that a block sees in part, of the size of that block and those keys; there is
never a Tq x Tk mask. The parts of a block are merged by their LSE in fp32. In the backward pass
ATen's kernel gets the output and LSE of the *full* row, so it computes a part's exact contribution
to the gradients.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``G = Hq / Hk``, ``Tq`` rows, ``Tk``
keys, ``D`` head dim, ``n`` rows of a block, ``K`` keys of a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.flash.cpu.blocks import Block, Kind, Limits, Part, Plan, plan_blocks
from raymm.kernels.flash.operands import BackwardTensors, prepare
from raymm.kernels.flash.operator import attention_operator
from raymm.kernels.mask.mask import AttentionMask, as_masks

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Overhead of a call, in multiply-adds (0.1 ms at 65 GFLOP/s, forward and backward). Divided by the
# number of heads and the head dim, it is the planner's overhead in (row, key) pairs.
CALL_COST = 500_000
# Within a call, ATen sums the gradients of keys in the inputs' dtype; over calls, sums are in fp32.
# Larger blocks are not faster.
BLOCK_ROWS = 1024
# Parts with fewer (row, key) pairs run backward in fp32 even for bf16 inputs. For bf16, ATen uses
# oneDNN, which compiles code for every new shape (about 5 ms and 1 MB per part); only larger parts
# gain more than that.
NATIVE_PAIRS = 2**20
# The kernel in plain torch operations materializes scores of Hq x rows x keys.
DENSE_LIMITS = {"rows": 256, "keys": 1024, "triangles": False}


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: AttentionMask | Sequence[AttentionMask],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * Q K^T where visible) V on the CPU, without a Tq x Tk mask.

    Inputs are cast under autocast as in `scaled_dot_product_attention`. Second derivatives are not
    supported.

    Args:
        query: (B, Hq, Tq, D); fp32, bf16, fp16 or fp64, any strides.
        key, value: (B, Hk, Tk, D) of the same dtype; Hq is a multiple of Hk.
        masks: one per sequence, (Tq, Tk) each, which may repeat an object; or one for all.
        scale: default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2), in plain torch
            operations, which are slower.

    Returns:
        Output (B, Hq, Tq, D) in the inputs' dtype and LSE (B, Hq, Tq) fp32, natural log, not
        differentiable. Rows that see no key have output 0 and LSE -inf, and give no gradient.

    Raises:
        ValueError: shapes, dtypes or masks do not fit one another.
    """
    if query.device.type != "cpu":
        raise ValueError(f"query, key and value must be on the CPU, got {query.device}")
    query, key, value = prepare(query, key, value, softcap)
    masks = as_masks(masks, query.shape[0], query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return _CpuAttention.apply(query, key, value, masks, scale, softcap)


def cpu_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[AttentionMask, ...],
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output in the inputs' dtype and LSE in at least fp32, without autograd.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        masks: one per sequence of the batch.
    """
    query, key, value = (_unit_stride(t) for t in (query, key, value))
    batch, heads, rows, _ = query.shape
    # Memory order (B, Tq, Hq, D), which the projection after attention reads.
    out = query.new_zeros(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    lse = query.new_full((batch, heads, rows), -math.inf, dtype=_wide_dtype(query))
    with torch.autocast("cpu", enabled=False):
        for plan, sequences in _plans(query, value, masks, softcap):
            units = [_unit(query, key, value, out, lse, s) for s in sequences]
            for block in plan.blocks:
                _block_forward(block, plan, units, scale, softcap)
    return out, lse


def cpu_backward(
    tensors: BackwardTensors,
    masks: tuple[AttentionMask, ...],
    scale: float,
    softcap: float | None,
    needs: Sequence[bool] = (True, True, True),
) -> list[torch.Tensor | None]:
    """Return dQ, dK, dV in at least fp32, without autograd.

    Args:
        masks: one per sequence of the batch.
        needs: True for those of dQ, dK and dV that are needed.
    """
    grad_out, query, key, value = map(_unit_stride, tensors[:4])
    # Sums over blocks are kept in fp32.
    dtype = torch.promote_types(query.dtype, torch.float32)
    grads = [
        torch.zeros_like(t, dtype=dtype) if needed else None
        for t, needed in zip((query, key, value), needs, strict=True)
    ]
    with torch.autocast("cpu", enabled=False):
        for plan, sequences in _plans(query, value, masks, softcap):
            units = [
                (
                    _unit(query, key, value, tensors.out, tensors.lse, grad_out, s),
                    [g if g is None else _split_heads(g, s, key.shape[1]) for g in grads],
                )
                for s in sequences
            ]
            for block in plan.blocks:
                _block_backward(block, plan, units, scale, softcap)
    return grads


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        masks: tuple[AttentionMask, ...],
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_operator(
            lambda q, k, v: cpu_forward(q, k, v, masks, scale, softcap), query, key, value
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.masks, ctx.scale, ctx.softcap = masks, scale, softcap
        lse32 = lse.float()
        ctx.mark_non_differentiable(lse32)
        return out, lse32

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        tensors = BackwardTensors(grad_out, *ctx.saved_tensors)
        grads = cpu_backward(
            tensors, ctx.masks, ctx.scale, ctx.softcap, ctx.needs_input_grad[:3]
        )
        return *(g if g is None else g.to(tensors.query.dtype) for g in grads), None, None, None


def _block_forward(
    block: Block, plan: Plan, units: list[tuple[torch.Tensor, ...]], scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Write output and LSE of a block's rows."""
    biases = [_bias(plan, block, part, _wide_dtype(units[0][0])) for part in block.parts]
    for query, key, value, out, lse in units:
        rows, results = _take(query, block.rows), []
        for part, (bias, hidden) in zip(block.parts, biases, strict=True):
            results.append(
                _part_forward(
                    rows, _take(key, part.runs), _take(value, part.runs), part.kind, bias,
                    scale, softcap,
                )
            )  # fmt: skip
            if hidden is not None:
                # ATen returns an LSE of 0 for rows that see no key.
                results[-1][1].masked_fill_(hidden, -math.inf)
        if len(results) == 1:
            _put(out, block.rows, results[0][0])
            _put(lse, block.rows, results[0][1])
            continue
        total = torch.logsumexp(torch.stack([part_lse for _, part_lse in results]), dim=0)
        # For rows that see no key, compute exp(-inf - 0) instead of exp(-inf + inf).
        finite = _finite(total)
        weights = [(part_lse - finite).exp_().unsqueeze(-1) for _, part_lse in results]
        merged = results[0][0] * weights[0]
        for (part_out, _), weight in zip(results[1:], weights[1:], strict=True):
            merged.addcmul_(part_out.to(merged.dtype), weight)
        _put(out, block.rows, merged)
        _put(lse, block.rows, total)


def _block_backward(
    block: Block, plan: Plan,
    units: list[tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]], scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Add the contribution of a block's rows to the gradients."""
    biases = [_bias(plan, block, part, _wide_dtype(units[0][0][0])) for part in block.parts]
    for (query, key, value, out, lse, grad_out), grads in units:
        rows, row_grad, row_out, row_lse = (
            _take(t, block.rows) for t in (query, grad_out, out, lse)
        )
        # For rows that see no key, exp(-inf - 0) is 0 and exp(-inf + inf) is NaN.
        row_lse = _finite(row_lse)
        row_sum = None
        for part, (bias, _) in zip(block.parts, biases, strict=True):
            keys, values = _take(key, part.runs), _take(value, part.runs)
            tensors = BackwardTensors(row_grad, rows, keys, values, row_out, row_lse)
            shares = _part_backward(tensors, part.kind, bias, scale, softcap)
            row_sum = shares[0] if row_sum is None else _wide(row_sum).add_(shares[0])
            for grad, share in zip(grads[1:], shares[1:], strict=True):
                if grad is not None:
                    _add(grad, part.runs, share)
        if grads[0] is not None and row_sum is not None:
            _put(grads[0], block.rows, row_sum)


def _part_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind,
    bias: torch.Tensor | None, scale: float, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return output and LSE of (N, H, n, D) rows over the keys of one part, (N, M, K, D)."""
    if softcap is not None or value.shape[-1] != query.shape[-1]:
        return _dense_forward(query, key, value, bias, scale, softcap)
    shape = query.shape
    if kind is Kind.FULL:
        query = _fold(query, key)
    else:
        key, value = (t.expand(-1, shape[1], -1, -1) for t in (key, value))
    out, lse = _forward(
        query, key, value, 0.0, kind is Kind.CAUSAL, attn_mask=bias, scale=scale
    )
    return out.reshape(shape), lse.reshape(shape[:3])


def _part_backward(
    tensors: BackwardTensors, kind: Kind, bias: torch.Tensor | None, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return a part's gradients: (N, H, n, D), and twice (N, M, K, D)."""
    grad_out, query, key, value, out, lse = tensors
    if softcap is not None or value.shape[-1] != query.shape[-1]:
        return _dense_backward(tensors, bias, scale, softcap)
    shape, key_heads = query.shape, key.shape[1]
    if shape[2] * key.shape[2] < NATIVE_PAIRS:
        grad_out, query, key, value, out = (
            _wide(t) for t in (grad_out, query, key, value, out)
        )
    if kind is Kind.FULL:
        grad_out, query, out = (_fold(t, key) for t in (grad_out, query, out))
        lse = lse.reshape(query.shape[:3])
    else:
        key, value = (t.expand(-1, shape[1], -1, -1) for t in (key, value))
    dq, dk, dv = _backward(
        grad_out, query, key, value, out, lse, 0.0, kind is Kind.CAUSAL, attn_mask=bias,
        scale=scale,
    )  # fmt: skip
    if dk.shape[1] != key_heads:
        dk, dv = (_wide(t).sum(1, keepdim=True) for t in (dk, dv))
    return dq.reshape(shape), dk, dv


def _dense_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a few rows over a few keys in plain torch operations, for what ATen's
    kernel lacks: soft-capped scores, and values of another width than keys. Scores are materialized
    in fp32, (N, M, G, n, K) for ``M`` key heads. Return output (N, M * G, n, Dv) and LSE (N, M * G,
    n), fp32; rows that see no key have output 0 and LSE -inf.

    Args:
        query, key, value: (N, M * G, n, D), (N, M, K, D) and (N, M, K, Dv).
        bias: (1, 1, n, K), 0 or -inf; None if all pairs are visible.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None to leave them.
    """
    scores, _ = _scores(_grouped(query, key), _wide(key), bias, scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    out = _product(weights, _wide(value))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _dense_backward(
    tensors: BackwardTensors, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, key and value in fp32. Shapes are those of
    :func:`_dense_forward`; output and LSE are those of the full rows."""
    grad_out, query, key, value, out, lse = tensors
    rows, keys, values = _grouped(query, key), _wide(key), _wide(value)
    grad_out, out = _grouped(grad_out, key), _grouped(out, key)
    lse = lse.unflatten(1, (key.shape[1], -1)).to(rows.dtype)
    scores, slope = _scores(rows, keys, bias, scale, softcap)
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad = _product(grad_out, values.mT).sub_(delta).mul_(weights)
    if slope is not None:
        grad.mul_(slope)
    grad.mul_(scale)
    grad_value = weights.flatten(2, 3).mT @ grad_out.flatten(2, 3)
    grad_key = grad.flatten(2, 3).mT @ rows.flatten(2, 3)
    return _product(grad, keys).flatten(1, 2), grad_key, grad_value


def _scores(
    rows: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return (N, M, G, n, K) scores, and the derivative of the softcap at each."""
    scores, slope = _product(rows * scale, keys.mT), None
    if softcap is not None:
        tanh = scores.div_(softcap).tanh_()
        slope = tanh.square().neg_().add_(1)
        scores = tanh.mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    return scores, slope


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute (N, M, G, n, X) @ (N, M, X, Y) as one product of G n rows per key head."""
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _grouped(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _wide(rows).unflatten(1, (key.shape[1], -1))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


def _fold(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Concatenate the rows of the heads that share a key head, if every row sees every key: a
    matrix product of G n rows is faster than G products of n."""
    if rows.shape[1] == key.shape[1]:
        return rows
    return rows.reshape(rows.shape[0], 1, -1, rows.shape[-1])


def _bias(
    plan: Plan, block: Block, part: Part, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the bias for the scores of a masked part, (1, 1, n, K), and (n,) True for rows that
    see no key of it, or None if all rows see one."""
    if part.kind is not Kind.MASKED:
        return None, None
    visible = plan.visible(block, part)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)
    hidden = ~visible.any(dim=1)
    return bias[None, None], hidden if hidden.any() else None


def _take(tensor: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the rows or keys (third dimension) of ``runs``; a view for a single run."""
    slices = [tensor[:, :, start:stop] for start, stop in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=2)


def _put(tensor: torch.Tensor, runs: Sequence[tuple[int, int]], source: torch.Tensor) -> None:
    offset = 0
    for start, stop in runs:
        tensor[:, :, start:stop] = source[:, :, offset : offset + stop - start]
        offset += stop - start


def _add(tensor: torch.Tensor, runs: Sequence[tuple[int, int]], source: torch.Tensor) -> None:
    offset = 0
    for start, stop in runs:
        tensor[:, :, start:stop] += source[:, :, offset : offset + stop - start]
        offset += stop - start


def _plans(
    query: torch.Tensor, value: torch.Tensor, masks: tuple[AttentionMask, ...],
    softcap: float | None,
) -> Iterator[tuple[Plan, list[slice]]]:  # fmt: skip
    """Yield plans with their sequences; sequences with equal masks share a plan."""
    work = query.shape[1] * query.shape[-1]
    # Rounded to a power of two, so that similar tensors share plans.
    limits = Limits(2 ** round(math.log2(max(CALL_COST / work, 1))), rows=BLOCK_ROWS)
    if softcap is not None or value.shape[-1] != query.shape[-1]:
        limits = Limits(limits.overhead, **DENSE_LIMITS)
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for index, mask in enumerate(masks):
        tables = mask.query_table.tobytes(), mask.key_table.tobytes()
        groups.setdefault(tables, []).append(index)
    for indices in groups.values():
        yield plan_blocks(masks[indices[0]], limits), [slice(i, i + 1) for i in indices]


def _unit(*tensors_and_sequence: Any) -> tuple[torch.Tensor, ...]:
    """Return one sequence's tensors, with the query heads grouped by key head: (Hk, G, ...)."""
    *tensors, sequence = tensors_and_sequence
    return tuple(_split_heads(t, sequence, tensors[1].shape[1]) for t in tensors)


def _split_heads(tensor: torch.Tensor, sequence: slice, key_heads: int) -> torch.Tensor:
    return tensor[sequence].squeeze(0).unflatten(0, (key_heads, -1))


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_dtype(tensor))


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)
