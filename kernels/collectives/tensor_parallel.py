"""Operators between replicated and sharded tensors, for tensor parallelism.

Megatron's conjugate pairs: each operator's backward is the other one's forward, so that a
tensor that all members of a group have whole also has its whole gradient on all of them.

| operator | forward | backward | where |
| --- | --- | --- | --- |
| :func:`copy_to_shards` | identity | sum over the group | before sharded columns |
| :func:`reduce_from_shards` | sum over the group | identity | after sharded rows |
| :func:`gather_from_shards` | parts side by side | own part | after columns that are needed whole |
| :func:`split_to_shards` | own part | parts side by side | before rows whose input is whole |

They work on ordinary tensors, not on DTensors, which cost a dispatch per operation and can
not hold fewer KV heads than there are members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raymm.kernels.collectives.tensor_group import TensorGroup

Sizes = tuple[int, ...]


def copy_to_shards(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The tensor itself; its gradients, of which each member has a part, are summed.

    Args:
        tensor: any shape, the same on all members. Returned as it is if no gradient is asked
            for: then there is none to sum on any member.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _CopyToShards.apply(tensor, group)


def reduce_from_shards(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The sum over the group; each member's gradient is that of the sum.

    Args:
        tensor: any shape, as large on all members.
    """
    return tensor if group.size == 1 else _ReduceFromShards.apply(tensor, group)


def gather_from_shards(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    """The members' parts one after another along the last dim. What follows must be the same on
    all members: each one's gradient is taken to be complete.

    Args:
        tensor: (..., sizes[rank]).
        sizes: per member, how wide its part is.
        group: the members.

    Returns:
        (..., sum(sizes)), contiguous.
    """
    return tensor if group.size == 1 else _GatherFromShards.apply(tensor, group, sizes)


def split_to_shards(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    """This member's part of the last dim; the gradient is put together from all parts.

    Args:
        tensor: (..., sum(sizes)), the same on all members.
        sizes: per member, how wide its part is.
        group: the members.

    Returns:
        (..., sizes[rank]), contiguous.
    """
    return tensor if group.size == 1 else _SplitToShards.apply(tensor, group, sizes)


def _own(tensor: torch.Tensor, group: TensorGroup, sizes: Sizes) -> torch.Tensor:
    own = tensor.narrow(-1, sum(sizes[: group.rank]), sizes[group.rank])
    return own.clone(memory_format=torch.contiguous_format)


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: autograd may hand the same tensor to other operators.
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        # A copy: selective checkpointing may keep the product itself, to be summed again.
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
