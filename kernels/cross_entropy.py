"""Token cross entropy as a sum, so that any split of a step adds up to the same loss.

Logits are the largest tensor of a step: 8,192 tokens with a vocabulary of 152,000 take 2.5 GB in
bf16, and torch's cross entropy allocates three more tensors in fp32, each twice that size. This
implementation converts a few rows at a time to fp32. For the backward pass it saves the logits in
their own dtype and two numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.tensor_group import TensorGroup

# Logits that are held in fp32 at a time: 64 MiB.
CHUNK_ELEMENTS = 1 << 24


def token_cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies of tokens, a scalar in fp32.

    Args:
        logits: (N, V), any floating dtype.
        targets: (N,) int64, no ignored entries. N may be 0.
    """
    return _CrossEntropy.apply(logits, targets, 0, None)


def vocabulary_parallel_cross_entropy_sum(
    logits: torch.Tensor, targets: torch.Tensor, start: int, group: TensorGroup
) -> torch.Tensor:
    """Return :func:`token_cross_entropy_sum` of logits whose columns are split over a group.

    Only three numbers per token are communicated: the largest logit, the sum of exponentials, and
    the target's logit (Megatron-LM's vocabulary-parallel cross entropy). All members compute the
    same sum, so callers count it once. Each member's gradient covers its own columns.

    Args:
        logits: (N, V_local), any floating dtype: columns [start, start + V_local) of the
            vocabulary. Shards may differ in width, and may be empty.
        targets: (N,) int64 indices into the full vocabulary, no ignored entries, the same on all
            members. N may be 0.
        start: this member's first column.
        group: the members, in the order of their columns.

    Returns:
        Scalar fp32, the same on all members.
    """
    return _CrossEntropy.apply(logits, targets, start, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: TensorGroup | None
    ) -> torch.Tensor:
        tokens, width = logits.shape
        local = (targets >= start) & (targets < start + width)
        columns = torch.where(local, targets - start, 0)
        top = logits.new_full((tokens,), float("-inf"), dtype=torch.float32)
        if width:
            top.copy_(logits.amax(1))
        if group is not None:
            top = group.all_reduce_max(top)
        sums = top.new_zeros(2, tokens)  # sum of exponentials; the target's logit
        for rows in _chunks(logits):
            shifted = logits[rows] - top[rows, None]  # in fp32
            target_logits = shifted.gather(1, columns[rows, None])[:, 0]
            sums[1, rows] = torch.where(local[rows], target_logits, 0.0)
            sums[0, rows] = shifted.exp_().sum(1)
        if group is not None:
            sums = group.all_reduce(sums)
        logs = sums[0].log()
        # Separate numbers: of a rounded ``top + logs``, the exponential of large logits would have
        # an error of one unit in the last place per unit of ``top``.
        ctx.save_for_backward(logits, top, sums[0], local, columns)
        return (logs - sums[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, top, sums, local, columns = ctx.saved_tensors
        scale = (gradient / sums)[:, None]
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            values = (logits[rows] - top[rows, None]).exp_().mul_(scale[rows])
            values.scatter_add_(1, columns[rows, None], -gradient * local[rows, None])
            result[rows] = values
        return result, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows that are converted to fp32 one after another; none without columns."""
    tokens, width = logits.shape
    step = max(CHUNK_ELEMENTS // max(width, 1), 1)
    for start in range(0, tokens if width else 0, step):
        yield slice(start, start + step)
