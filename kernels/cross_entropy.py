"""Token cross entropy as a sum, so that any split of a step adds up to the same loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.tensor_group import TensorGroup


def token_cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross entropies over tokens, in fp32.

    Args:
        logits: (N, V), any floating dtype.
        targets: (N,) int64, no ignored entries. N may be 0.

    Returns:
        Scalar fp32: the sum over N of -log softmax(logits)[target].
    """
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def vocabulary_parallel_cross_entropy_sum(
    logits: torch.Tensor, targets: torch.Tensor, start: int, group: TensorGroup
) -> torch.Tensor:
    """:func:`token_cross_entropy_sum` of logits whose columns are split over a group.

    Only three numbers per token travel: the largest logit, the sum of exponentials, and the
    target's logit (Megatron-LM's vocabulary-parallel cross entropy). All members compute the
    same sum, which therefore counts once; each member's gradient is that of its own columns.

    Args:
        logits: (N, V_local), any floating dtype: columns [start, start + V_local) of the
            vocabulary. Shares may differ in width, and be empty.
        targets: (N,) int64 in the whole vocabulary, no ignored entries, the same on all
            members. N may be 0.
        start: this member's first column.
        group: the members, in the order of their columns.

    Returns:
        Scalar fp32, the same on all members.
    """
    return _VocabularyCrossEntropy.apply(logits, targets, start, group)


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: TensorGroup
    ) -> torch.Tensor:
        values = logits.float()
        tokens, width = values.shape
        top = values.new_full((tokens,), float("-inf"))
        if width and tokens:
            top = values.amax(1)
        top = group.all_reduce_max(top)
        shifted = values - top[:, None]
        local = (targets >= start) & (targets < start + width)
        columns = torch.where(local, targets - start, 0)
        sums = values.new_zeros(2, tokens)  # of exponentials; the target's logit
        if width:
            own = shifted.gather(1, columns[:, None])[:, 0]
            sums[1] = torch.where(local, own, 0.0)
            exponentials = shifted.exp_()
            sums[0] = exponentials.sum(1)
        else:
            exponentials = shifted
        sums = group.all_reduce(sums)
        probabilities = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, local, columns)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, local, columns = ctx.saved_tensors
        result = probabilities.clone()  # the graph may be asked again
        if result.shape[1]:
            result.scatter_add_(1, columns[:, None], -local.float()[:, None])
        return (result * gradient).to(ctx.dtype), None, None, None
