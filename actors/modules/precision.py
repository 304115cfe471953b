"""Mixed precision: casts that autocast would repeat in every forward are done once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

FUSED_ELEMENTS = 2**16
"""Least elements of a parameter whose gradients are added in one kernel, by a call of Python."""
# Sequence number of an autograd node that runs as early as possible.
_FIRST = 2**63 - 1

CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose weights autocast casts at every use."""
CAST_ONCE = "_computes_in_autocast"
"""Attribute that marks other modules whose weights are also used in autocast's dtype."""


def disable_tf32() -> None:
    """Compute fp32 products in full fp32: cuDNN, and cuBLAS in NVIDIA's images, default to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert frozen matrix-product weights to ``dtype``, in place; their fp32 values are lost.
    Autocast casts frozen weights in every forward, a large part of the time of small microbatches.
    Results are bit-identical. Weights that autocast leaves in fp32 (norms, embeddings) are
    unchanged. An embedding tied to a head keeps its fp32 weight; the head gets a copy."""
    cast: dict[int, nn.Parameter] = {}
    for child in module.modules():
        if not isinstance(child, CAST_BY_AUTOCAST):
            continue
        for name in ("weight", "bias"):  # scales of a quantised weight are unchanged
            parameter = child._parameters.get(name)
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.dtype == torch.float32:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
                child._parameters[name] = cast[id(parameter)]
    return module


class ComputeCopies:
    """Copies of trainable matrix-product weights in autocast's dtype, shared by a step's
    microbatches.

    Autocast would keep a copy per microbatch in flight. Results are bit-identical: gradients arrive
    in autocast's dtype and are accumulated in fp32. Modules see the copies instead of their
    parameters while a step runs. For FSDP2 see
    :func:`raymm.actors.sharding.fully_sharded.shard_parameters`.

    Args:
        stages: built and on their device.
        dtype: autocast's dtype; None for no autocast and no copies.
    """

    def __init__(self, stages: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype, stages = dtype, list(stages)
        self._places = [] if dtype is None else [
            (child, name, parameter)
            for stage in stages for child in stage.modules()
            if isinstance(child, CAST_BY_AUTOCAST) or hasattr(child, CAST_ONCE)
            for name, parameter in child._parameters.items()
            if parameter is not None and parameter.requires_grad
            and type(parameter) is nn.Parameter and parameter.dtype == torch.float32
        ]
        copied = {(id(child), name) for child, name, _ in self._places}
        # A microbatch's gradients of these are added before they reach the parameter's: it is also
        # used without a copy (a tied embedding).
        self._also_used = {
            id(parameter) for stage in stages for child in stage.modules()
            for name, parameter in child._parameters.items() if (id(child), name) not in copied
        }

    @contextmanager
    def shown(self) -> Iterator[list[torch.Tensor]]:
        """Context manager in which modules compute with copies of their parameters; yields the
        copies."""
        try:
            self.show()
            yield [child.__dict__[name] for child, name, _ in self._places]
        finally:
            self.hide()

    def show(self, stream: AbstractContextManager[None] | None = None) -> None:
        """Let modules compute with copies of their current parameters until :meth:`hide`. Autograd
        runs the backward of the casts, and accumulates gradients, on ``stream``, which is entered
        while copies are made."""
        copies: dict[int, torch.Tensor] = {}
        with torch.enable_grad(), (stream if stream and self._places else nullcontext()):
            for child, name, parameter in self._places:
                if id(parameter) not in copies:
                    fused = (
                        parameter.numel() >= FUSED_ELEMENTS
                        and id(parameter) not in self._also_used
                    )
                    copy = _Copy.apply if fused else torch.Tensor.to
                    copies[id(parameter)] = _early_gradient(copy(parameter, self._dtype))
                child.__dict__[name] = copies[id(parameter)]

    def hide(self) -> None:
        """Drop the copies, before parameters change."""
        for child, name, _ in self._places:
            child.__dict__.pop(name, None)


class _Copy(torch.autograd.Function):
    """Copy of a parameter in another dtype. Its gradient is added to the parameter's in one kernel;
    autograd would cast it first, and write and read another fp32 tensor. Results are
    bit-identical."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        ctx.parameter = parameter
        return parameter.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        parameter = ctx.parameter
        if parameter.grad is None or parameter._backward_hooks:
            return gradient.to(parameter.dtype), None
        parameter.grad.add_(gradient)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)
        return None, None


def _early_gradient(copy: torch.Tensor) -> torch.Tensor:
    """Make autograd accumulate a copy's gradient as soon as it is complete. Autograd runs the
    oldest nodes last. The copies are the oldest, so the gradients of all layers would stay in
    memory until the backward ends, and sums over replicas would start late."""
    node = cast(Any, copy.grad_fn)
    node._set_sequence_nr(_FIRST)
    return copy
