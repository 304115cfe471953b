"""Attention with a raymm mask as one operator, which ``torch.compile`` traces without a graph
break.

A graph passes tensors and numbers, not objects, so the masks of a batch travel as a table: a 1-d
int64 tensor on the host. The operator reads the table when it runs. A compiled graph therefore
serves all masks, and the table stays with the tensors that are saved for the backward pass.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys, ``D`` head
dim of queries and keys, ``Dv`` of values. Tokens come before heads, as projections make them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raymm.kernels.choice.choice import KERNEL_CHOICE
from raymm.kernels.flash.operands import BackwardTensors, as_autocast, prepare
from raymm.kernels.mask.columns import KEY_COLUMNS, QUERY_COLUMNS
from raymm.kernels.mask.mask import AttentionMask, as_masks

_CACHED_MASKS = 64
_HEADER = 4  # numbers in front of a mask's tables


@lru_cache(_CACHED_MASKS)
def mask_table(masks: tuple[AttentionMask, ...]) -> torch.Tensor:
    """Return the masks of a batch, one per sequence or one for all, as a 1-d int64 tensor."""
    distinct = list(dict.fromkeys(masks))
    numbers = [len(masks), len(distinct), *(distinct.index(mask) for mask in masks)]
    parts = [np.array(numbers, dtype=np.int64)]
    for mask in distinct:
        sizes = [*mask.shape, len(mask.query_table), len(mask.key_table)]
        parts += [
            np.array(sizes, dtype=np.int64), mask.query_table.ravel(), mask.key_table.ravel()
        ]
    return torch.from_numpy(np.concatenate(parts))


def table_masks(table: torch.Tensor, window: int | None = None) -> tuple[AttentionMask, ...]:
    """Invert :func:`mask_table`, with the masks narrowed to a sliding window. Equal tables return
    the same objects, so that all layers share the kernels' plans."""
    return _masks(table.numpy().tobytes(), window)


@lru_cache(_CACHED_MASKS)
def _masks(data: bytes, window: int | None) -> tuple[AttentionMask, ...]:
    numbers = np.frombuffer(data, dtype=np.int64)
    count, n_distinct = numbers[:2].tolist()
    indices, start = numbers[2 : 2 + count].tolist(), 2 + count
    distinct = []
    for _ in range(n_distinct):
        n_queries, n_keys, *segments = numbers[start : start + _HEADER].tolist()
        start += _HEADER
        tables = []
        for rows, columns in zip(segments, (QUERY_COLUMNS, KEY_COLUMNS), strict=True):
            tables.append(numbers[start : start + rows * columns].reshape(rows, columns))
            start += rows * columns
        mask = AttentionMask(tables[0], tables[1], n_queries, n_keys)
        distinct.append(mask if window is None else mask.windowed(window))
    return tuple(distinct[index] for index in indices)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute :func:`raymm.kernels.attention.attention` by raymm's kernels, in one operator.

    Args:
        query: (B, Hq, Tq, D).
        key, value: (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        table: the masks, by :func:`mask_table`.
        window: sliding window by which the masks are narrowed; None for none.

    Returns:
        (B, Tq, Hq, Dv), tokens before heads.
    """
    query, key, value = (t.transpose(1, 2) for t in as_autocast(query, key, value))
    return _forward(query, key, value, table, window, scale, softcap)[0]


@torch.library.custom_op(
    "raymm::masked_attention", mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor table, int? window, float? scale, "
    "float? softcap) -> (Tensor, Tensor)",
)
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    window: int | None, scale: float | None, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return output (B, Tq, Hq, Dv) in the inputs' dtype, and LSE (B, Hq, Tq) in at least fp32."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    query, key, value = prepare(query, key, value, softcap)
    masks = as_masks(table_masks(table, window), *_sizes(query, key, value))
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if query.device.type == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_forward as run
    else:
        from raymm.kernels.flash.gpu.attention import triton_forward as run
    out, lse = run(query, key, value, masks, scale, softcap)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@_forward.register_fake
def _(query, key, value, table, window, scale, softcap):
    batch, rows, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty((batch, rows, heads, value.shape[-1])),
        query.new_empty((batch, heads, rows), dtype=wide),
    )


@torch.library.custom_op(
    "raymm::masked_attention_backward", mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor table, int? window, float? scale, float? softcap) -> (Tensor, Tensor, Tensor)",
)
def _backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, in their shapes and dtype."""
    *tensors, lse, table, window, scale, softcap = arguments
    tensors = BackwardTensors(*(t.transpose(1, 2) for t in tensors), lse=lse)
    query, key, value = tensors[1:4]
    masks = as_masks(table_masks(table, window), *_sizes(query, key, value))
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    gradients: Any
    if query.device.type == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_backward

        gradients = cpu_backward(tensors, masks, scale, softcap)
    else:
        from raymm.kernels.flash.gpu.attention import triton_backward

        gradients = triton_backward(
            tensors, masks, scale, softcap, dtype=query.dtype,
            unordered=KERNEL_CHOICE.kernels == "raymm_unordered",
        )
    dq, dk, dv = (t.transpose(1, 2).to(query.dtype).contiguous() for t in gradients)
    return dq, dk, dv


@_backward.register_fake
def _(grad_out, query, key, value, *_):
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, table, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, table)


def _gradients(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    gradients = _backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _sizes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[int, int, int]:
    return query.shape[0], query.shape[2], key.shape[2]
