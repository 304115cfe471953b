"""Mixed precision: what autocast would cast anew in every forward, cast once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

# Of an autograd node that runs before all others that could, but for those that accumulate.
_FIRST = 2**63 - 1

CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose weights autocast casts at every use."""
CAST_ONCE = "_computes_in_autocast"
"""An attribute of other modules that are to compute with weights in autocast's dtype, too."""


def disable_tf32() -> None:
    """Compute fp32 products and convolutions in fp32: cuDNN uses TF32 (10 bits of mantissa) by
    default, and cuBLAS where ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`` is set, as in NVIDIA's images."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep frozen matrix-product weights in ``dtype``, in place.

    Autocast caches only the casts of trainable weights, so a frozen one is cast in every
    forward: for small microbatches that is a large part of the time. Numbers stay exactly
    those of autocast: the same values are rounded once, only earlier, and what autocast
    leaves in fp32 (norms, embeddings) is left alone. An embedding tied to a head keeps its
    fp32 weight; the head gets its own copy.

    Args:
        module: a stage; its fp32 values of the cast weights are lost.
        dtype: autocast's dtype.
    """
    cast: dict[int, nn.Parameter] = {}
    for child in module.modules():
        if not isinstance(child, CAST_BY_AUTOCAST):
            continue
        for name in ("weight", "bias"):  # scales of a quantised weight stay as they are
            parameter = child._parameters.get(name)
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.dtype == torch.float32:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
                child._parameters[name] = cast[id(parameter)]
    return module


class ComputeCopies:
    """Trainable matrix-product weights in autocast's dtype, cast once for all microbatches of a
    step.

    Autocast by itself casts a weight anew in every microbatch, and each microbatch keeps its copy
    until its backward: with eight under way, eight copies of all weights. Numbers are exactly
    autocast's: the same values rounded once, of which every microbatch's gradient comes in
    autocast's dtype and is added up in fp32. What autocast leaves in fp32 is left alone, and so are
    parameters themselves: modules are shown the copies in their place while a step runs.

    Sharded parameters (FSDP2) have a policy of their own
    (:func:`raymm.actors.sharding.fully_sharded.shard_parameters`).

    Args:
        stages: whose weights; built and on their device.
        dtype: autocast's; None for no autocast, and no copies.
    """

    def __init__(self, stages: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._places = [] if dtype is None else [
            (child, name, parameter)
            for stage in stages for child in stage.modules()
            if isinstance(child, CAST_BY_AUTOCAST) or hasattr(child, CAST_ONCE)
            for name, parameter in child._parameters.items()
            if parameter is not None and parameter.requires_grad
            and type(parameter) is nn.Parameter and parameter.dtype == torch.float32
        ]

    @contextmanager
    def shown(self) -> Iterator[list[torch.Tensor]]:
        """Context in which modules compute with copies of their parameters; yields the copies."""
        try:
            self.show()
            yield [child.__dict__[name] for child, name, _ in self._places]
        finally:
            self.hide()

    def show(self, stream: AbstractContextManager[None] | None = None) -> None:
        """Have the modules compute with copies of their present parameters, until :meth:`hide`.

        Args:
            stream: entered while the copies are made, if there are any. Autograd runs the backward
                of the casts, and adds to the parameters' gradients, on the same stream.
        """
        copies: dict[int, torch.Tensor] = {}
        with torch.enable_grad(), (stream if stream and self._places else nullcontext()):
            for child, name, parameter in self._places:
                if id(parameter) not in copies:
                    copies[id(parameter)] = _early_gradient(parameter.to(self._dtype))
                child.__dict__[name] = copies[id(parameter)]

    def hide(self) -> None:
        """Let go of the copies, before parameters change."""
        for child, name, _ in self._places:
            child.__dict__.pop(name, None)


def _early_gradient(copy: torch.Tensor) -> torch.Tensor:
    """A copy whose gradient is added to its parameter's as soon as it is complete. Autograd runs
    what was made last first, and copies are made before all else: their gradients, of all layers in
    the compute dtype, would be there until a backward ends, and no sum over replicas would begin
    before."""
    node = cast(Any, copy.grad_fn)
    node._set_sequence_nr(_FIRST)
    return copy
