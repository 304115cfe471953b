"""Attention on a GPU in Triton, forward and backward, for any :class:`AttentionMask`.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys,
``D`` head dim.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.nn.functional import pad

from raymm.kernels.flash.gpu.backward import (
    attention_backward_key,
    attention_backward_query,
    merge_backward,
    row_statistics,
)
from raymm.kernels.flash.gpu.device_tables import (
    AttentionPlan,
    DeviceTables,
    Layout,
    attention_plan,
    filled_tokens,
)
from raymm.kernels.flash.gpu.forward import attention_forward, merge_forward
from raymm.kernels.flash.gpu.launch_configs import (
    DEFAULT_LAUNCH,
    HEAD_DIM_MULTIPLE,
    MERGE_ROWS,
    SMALL_OPTIONS,
    SMALLEST_HEAD_DIM,
    KernelConfig,
    Launch,
    attention_config,
    constants,
    key_passes,
    options,
    padded_head_dim,
    scales,
    statistics_rows,
)
from raymm.kernels.flash.gpu.operands import (
    INTERPRETED,
    aligned,
    check_operands,
    describable,
    source,
    strides,
    sums_in_any_order,
)
from raymm.kernels.flash.operands import BackwardTensors
from raymm.kernels.flash.operator import attention_operator
from raymm.kernels.mask.mask import AttentionMask


def kernel_head_dim(head_dim: int, value_dim: int) -> int:
    """Return the columns of the padded tensors, for head dims D of keys and Dv of values. Zeros do
    not change scores. Vision towers have heads of 88 or 72 columns, and latent attention (DeepSeek)
    has values that are narrower than keys."""
    most = max(head_dim, value_dim, SMALLEST_HEAD_DIM)
    return -(-most // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def widened(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pad a (..., D) tensor with columns of zeros to ``head_dim`` columns; differentiable."""
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def narrowed(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the first ``head_dim`` columns, as a view."""
    return tensor if tensor.shape[-1] == head_dim else tensor[..., :head_dim]


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[AttentionMask, ...],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(softcap(scale Q K^T) where visible) V, differentiable and deterministic.

    Args:
        query: (B, Hq, Tq, D), bf16, fp16 or fp32; D at most 512 (computed as the next power of two
            from 32; copied if it is below 32 or not a multiple of 8).
        key: (B, Hk, Tk, D); Hq is a multiple of Hk. Rows that are not dense in the last dimension,
            or not aligned to 16 bytes, are copied.
        value: (B, Hk, Tk, Dv); if Dv is not D, the narrower tensors are copied.
        masks: one (Tq, Tk) mask per sequence, which may repeat an object. Plans are cached by these
            objects, so layers should share them.
        scale: positive; default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).

    Returns:
        Output (B, Hq, Tq, Dv) in the query's dtype, and LSE (B, Hq, Tq) fp32, natural logarithm,
        without a gradient. Rows that see no key have output 0, LSE -inf and give no gradient.

    Raises:
        ValueError: shapes do not fit, a head dim or dtype is not supported, tensors are not on a
            CUDA device (unless Triton interprets), or scale or softcap is not positive.
    """
    check_operands(query, key, value, masks)
    factors = scales(query.shape[-1], scale, softcap)
    value_dim, columns = value.shape[-1], kernel_head_dim(query.shape[-1], value.shape[-1])
    query, key, value = (widened(t, columns) for t in (query, key, value))
    plan = _plan((query, key, value), masks, softcap, launch)
    out, lse = _Attention.apply(query, key, value, plan, factors, softcap is not None)
    return narrowed(out, value_dim), lse


def triton_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[AttentionMask, ...],
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`triton_attention` without autograd."""
    check_operands(query, key, value, masks)
    factors = scales(query.shape[-1], scale, softcap)
    value_dim, columns = value.shape[-1], kernel_head_dim(query.shape[-1], value.shape[-1])
    query, key, value = (aligned(widened(t, columns)) for t in (query, key, value))
    plan = _plan((query, key, value), masks, softcap)
    with _on(query.device):
        out, lse = _forward(query, key, value, plan, factors, softcap is not None)
    return narrowed(out, value_dim), lse


def triton_backward(
    tensors: BackwardTensors,
    masks: tuple[AttentionMask, ...],
    scale: float,
    softcap: float | None,
    *,
    dtype: torch.dtype = torch.float32,
    unordered: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dQ, dK, dV in ``dtype``, without autograd.

    Args:
        masks: one per sequence of the batch.
        unordered: as in :class:`Launch`.
    """
    query_dim, value_dim = tensors.query.shape[-1], tensors.value.shape[-1]
    factors = scales(query_dim, scale, softcap)
    columns = kernel_head_dim(query_dim, value_dim)
    wide = BackwardTensors(
        *(aligned(widened(t, columns)) for t in tensors[:-1]), lse=tensors.lse.contiguous()
    )
    plan = _plan(wide[1:4], masks, softcap, Launch(unordered=unordered))
    with _on(wide.query.device):
        gradients = _backward(wide, plan, factors, softcap is not None, True, True, dtype)
    dq, dk, dv = (
        None if gradient is None else narrowed(gradient, dim)
        for gradient, dim in zip(gradients, (query_dim, query_dim, value_dim), strict=True)
    )
    return dq, dk, dv


def _plan(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    masks: tuple[AttentionMask, ...],
    softcap: float | None,
    launch: Launch = DEFAULT_LAUNCH,
) -> AttentionPlan | None:
    if not len(masks):
        return None
    query, key, _ = inputs
    config = launch.config
    if config is None:
        config = attention_config(
            query.shape[-1], query.dtype, softcap=softcap is not None,
            descriptors=describable(*inputs),
            unordered=launch.unordered and sums_in_any_order(query.device),
        )  # fmt: skip
    row_bytes = query.shape[-1] * query.element_size()
    layout = _layout(query.device, query.shape[1], key.shape[1], row_bytes, launch.processors)
    return attention_plan(tuple(masks), config, layout, query.device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan, factors, softcap):
        query, key, value = (aligned(t) for t in (query, key, value))
        with _on(query.device):
            out, lse = attention_operator(
                lambda q, k, v: _forward(q, k, v, plan, factors, softcap), query, key, value
            )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.factors, ctx.softcap = plan, factors, softcap
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, _):
        if grad_out is None:
            return (None,) * 6
        tensors = BackwardTensors(aligned(grad_out), *ctx.saved_tensors)
        for_query, for_key, for_value = ctx.needs_input_grad[:3]
        with _on(grad_out.device):
            grads = _backward(
                tensors, ctx.plan, ctx.factors, ctx.softcap, for_query, for_key or for_value
            )
        pairs = zip(grads, ctx.needs_input_grad[:3], strict=True)
        return (*(grad if needed else None for grad, needed in pairs), None, None, None)


def _forward(query, key, value, plan, factors, softcap):
    batch, n_heads, n_queries, head_dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty((batch, n_heads, n_queries), dtype=torch.float32)
    if not out.numel():
        return out, lse
    kernel, tables = plan.config.forward, plan.forward
    part_out, part_lse = lse, lse
    if tables.slots:
        rows = tables.slots * n_heads * kernel.block_q
        part_out = lse.new_empty((rows, padded_head_dim(head_dim)))
        part_lse = lse.new_empty(rows)
    _launch(
        attention_forward, kernel, query, plan, tables, n_heads, softcap,
        *_sources(kernel, query, key, value), out, lse, part_out, part_lse,
        plan.bounds, plan.attend, plan.identity, tables.items, tables.runs, *factors[:2],
        len(tables.items), tables.head_span, plan.layout.group, n_heads, n_queries, key.shape[2],
        *strides(query), *strides(key), *strides(value), *strides(out),
    )  # fmt: skip
    if tables.slots:
        _kernel(merge_forward)[_merge_grid(tables, n_heads, kernel.block_q)](
            part_out, part_lse, out, lse, tables.merges, n_heads, n_queries, *strides(out),
            **_merge_constants(head_dim, kernel.block_q),
        )  # fmt: skip
    return out, lse


def _backward(
    tensors: BackwardTensors, plan, factors, softcap, for_query, for_key, dtype=None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    grad_out, query, key, value, out, lse = tensors
    batch, n_heads, n_queries, head_dim = query.shape
    grad_query = torch.empty_like(query, dtype=dtype) if for_query else None
    grad_key, grad_value = (
        torch.empty_like(t, dtype=dtype) if for_key else None for t in (key, value)
    )
    if not query.numel():
        for gradient in (grad_query, grad_key, grad_value):
            if gradient is not None:
                gradient.zero_()
        return grad_query, grad_key, grad_value
    # Kernels without softcap subtract LSE before they scale scores to base 2.
    factor = math.log2(math.e) / (1.0 if softcap else factors[1])
    stats = lse.new_empty((batch, n_heads, 2, filled_tokens(n_queries)))
    rows = statistics_rows(head_dim)
    _kernel(row_statistics)[(batch * n_heads * (stats.shape[-1] // rows),)](
        out, grad_out, lse, stats, factor, n_heads, n_queries,
        *strides(out), *strides(grad_out),
        D=head_dim, BLOCK_D=padded_head_dim(head_dim), ROWS=rows, **SMALL_OPTIONS,
    )  # fmt: skip
    uses = plan.config.backward_query.descriptors or plan.config.backward_key.descriptors
    if uses and not describable(grad_out):  # for example the expanded gradient of a sum
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
    inputs = (query, key, value, grad_out)
    group, n_keys = plan.layout.group, key.shape[2]
    all_strides = [s for t in (query, key, value, grad_out) for s in strides(t)]
    sums = stats
    with_query = plan.config.backward_key.unordered and for_query and for_key and key.numel() > 0
    if with_query:
        sums = stats.new_zeros((batch, n_heads, stats.shape[-1], padded_head_dim(head_dim)))
    elif grad_query is not None:
        kernel, tables = plan.config.backward_query, plan.backward_query
        partials = _parts(lse, tables, n_heads, kernel.block_q, head_dim)
        _launch(
            attention_backward_query, kernel, query, plan, tables, n_heads, softcap,
            *_sources(kernel, *inputs), stats, grad_query, partials,
            plan.bounds, plan.attend, plan.identity, tables.items, tables.runs, *factors,
            len(tables.items), tables.head_span, group, n_heads, n_queries, n_keys,
            *all_strides, *strides(grad_query),
        )  # fmt: skip
        _merge(partials, grad_query, tables, kernel.block_q)
    if grad_key is not None and grad_value is not None and key.numel():
        kernel, tables, key_heads = plan.config.backward_key, plan.backward_key, key.shape[1]
        partials = [_parts(lse, tables, key_heads, kernel.block_k, head_dim) for _ in range(2)]
        for key_pass in key_passes(kernel, with_query=with_query):
            _launch(
                attention_backward_key, kernel, query, plan, tables, key_heads, softcap,
                *_sources(kernel, *inputs), stats, _target(kernel, sums),
                grad_key, grad_value, *partials,
                plan.bounds, plan.attend, plan.identity, tables.items, tables.runs, *factors,
                len(tables.items), tables.head_span, group, key_heads, n_queries, n_keys,
                *all_strides, *strides(grad_key), *strides(grad_value), **key_pass,
            )  # fmt: skip
        _merge(partials[0], grad_key, tables, kernel.block_k)
        _merge(partials[1], grad_value, tables, kernel.block_k)
        if with_query and grad_query is not None:
            grad_query.copy_(sums[:, :, :n_queries, :head_dim].mul_(factors[2]))
    return grad_query, grad_key, grad_value


def _kernel(function: Any) -> Any:
    """Return a small kernel untyped, because Triton's types reject plain numbers for
    ``tl.constexpr``."""
    return function


def _sources(kernel: KernelConfig, query, key, value, *grad_out) -> list[Any]:
    """Return the inputs of a kernel, as tensors or as descriptors."""
    columns = padded_head_dim(query.shape[-1])
    sides = [(query, kernel.block_q), (key, kernel.block_k), (value, kernel.block_k)]
    sides += [(tensor, kernel.block_q) for tensor in grad_out]
    return [source(t, rows, columns, descriptors=kernel.descriptors) for t, rows in sides]


def _target(kernel: KernelConfig, sums: torch.Tensor) -> Any:
    """Return the tensor that a kernel adds rows to, or its descriptor (not in the interpreter)."""
    by_descriptor = kernel.unordered and kernel.descriptors and not INTERPRETED
    return source(sums, kernel.block_q, sums.shape[-1], descriptors=by_descriptor)


def _launch(
    function: Any,
    kernel: KernelConfig,
    query: torch.Tensor,
    plan: AttentionPlan,
    tables: DeviceTables,
    n_heads: int,
    softcap: bool,
    *arguments: Any,
    **more: Any,
) -> None:
    """Run a large kernel: one program per work item and head."""
    constant = constants(
        kernel, query.shape[-1], bits=plan.needs_bits, softcap=softcap, interpreted=INTERPRETED
    )
    grid = (len(tables.items) * n_heads,)
    function[grid](*arguments, **constant, **more, **options(kernel))


def _parts(like, tables: DeviceTables, n_heads: int, rows: int, head_dim: int) -> torch.Tensor:
    """Return the workspace of a split gradient; any fp32 tensor if nothing is split."""
    if not tables.slots:
        return like
    return like.new_empty((tables.slots * n_heads * rows, padded_head_dim(head_dim)))


def _merge(parts: torch.Tensor, out: torch.Tensor, tables: DeviceTables, block: int) -> None:
    if tables.slots:
        _kernel(merge_backward)[_merge_grid(tables, out.shape[1], block)](
            parts, out, tables.merges, out.shape[1], out.shape[2], *strides(out),
            **_merge_constants(out.shape[-1], block),
        )  # fmt: skip


def _merge_grid(tables: DeviceTables, n_heads: int, block: int) -> tuple[int]:
    return (len(tables.merges) * n_heads * (block // MERGE_ROWS),)


def _merge_constants(head_dim: int, block: int) -> dict[str, int]:
    padded = padded_head_dim(head_dim)
    return {"D": head_dim, "BLOCK_D": padded, "M": block, "ROWS": MERGE_ROWS, **SMALL_OPTIONS}


def _layout(
    device: torch.device, query_heads: int, key_heads: int, row_bytes: int, processors: int | None
) -> Layout:
    if device.type != "cuda":
        return Layout(query_heads, key_heads, row_bytes, processors)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count if processors is None else processors
    return Layout(query_heads, key_heads, row_bytes, processors, properties.L2_cache_size)


def _on(device: torch.device):
    """Make the tensors' device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
