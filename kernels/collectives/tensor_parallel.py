"""Operators between replicated and sharded tensors, for tensor parallelism.

These are Megatron's conjugate pairs: the backward of each operator is the forward of the other. A
tensor that is replicated over a group therefore has a complete gradient on every member.

| operator | forward | backward | position |
| --- | --- | --- | --- |
| :func:`copy_to_shards` | identity | all-reduce | before column-parallel layers |
| :func:`reduce_from_shards` | all-reduce | identity | after row-parallel layers |
| :func:`gather_from_shards` | all-gather | own shard | after columns that are needed in full |
| :func:`split_to_shards` | own shard | all-gather | before rows with a replicated input |

They work on plain tensors. DTensor adds a dispatch per operation and does not support fewer KV
heads than members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.tensor_group import TensorGroup

Sizes = tuple[int, ...]


def copy_to_shards(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the tensor unchanged; backward sums its gradient over the group.

    Args:
        tensor: any shape, the same on all members. Returned as is if it needs no gradient.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _CopyToShards.apply(tensor, group)


def reduce_from_shards(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the sum over the group; backward passes the gradient through.

    Args:
        tensor: any shape, equal on all members.
    """
    return tensor if group.size == 1 else _ReduceFromShards.apply(tensor, group)


def gather_from_shards(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    """Concatenate the members' shards along the last dimension.

    All members must compute the same from the result: backward treats each member's gradient as
    complete.

    Args:
        tensor: (..., sizes[rank]).
        sizes: width of each member's shard.

    Returns:
        (..., sum(sizes)), contiguous.
    """
    return tensor if group.size == 1 else _GatherFromShards.apply(tensor, group, sizes)


def split_to_shards(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    """Return this member's shard of the last dimension; backward gathers the gradient of all
    shards.

    Args:
        tensor: (..., sum(sizes)), the same on all members.
        sizes: width of each member's shard.

    Returns:
        (..., sizes[rank]), contiguous.
    """
    return tensor if group.size == 1 else _SplitToShards.apply(tensor, group, sizes)


def _own(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    shard = tensor.narrow(-1, sum(sizes[: group.rank]), sizes[group.rank])
    return shard.clone(memory_format=torch.contiguous_format)


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Copy, because autograd may pass the same tensor to other operators.
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        # Copy, because selective checkpointing may save the product and sum it again.
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.all_gather(tensor, sizes, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(gradient, ctx.group, ctx.sizes), None, None


class _SplitToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _own(tensor, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.group.all_gather(gradient, ctx.sizes, -1), None, None
