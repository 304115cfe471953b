"""What a stage must not change while it runs: its mode, its statistics, its inputs; and whether
it may change the random number generators' state."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from raymm.actors.modules.message import Message
from raymm.scheduler.plan.stage import StageId

# Layers that draw no random numbers in training.
_DRAWLESS = frozenset({
    nn.Identity, nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm,
    nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GELU, nn.ReLU, nn.SiLU,
    nn.Tanh, nn.Sigmoid, nn.Sequential, nn.ModuleList,
})  # fmt: skip


def may_draw(module: nn.Module, drawless: Collection[type] = ()) -> bool:
    """Whether a module has a part in training mode that may draw random numbers: all may but
    layers of torch that do not, and those of the classes ``drawless``."""
    return any(
        part.training and type(part) not in _DRAWLESS and type(part) not in drawless
        for part in module.modules()
    )


@contextlib.contextmanager
def evaluating(stages: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Every module in eval mode; afterwards those that were in train mode are again."""
    switched = [module for stage in stages for module in stage.modules() if module.training]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True


@contextlib.contextmanager
def statistics_kept(stage: torch.nn.Module) -> Iterator[None]:
    """A recomputed forward does not update running statistics (batch norm) a second time.

    Buffers are exchanged for copies, not restored: autograd may have saved them.
    """
    kept = [
        (module, dict(module._buffers))
        for module in stage.modules()
        if isinstance(module, _NormBase) and module.training
    ]
    for module, buffers in kept:
        module._buffers.update({n: None if b is None else b.clone() for n, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


@contextlib.contextmanager
def inputs_unchanged(
    stage: StageId, messages: Collection[Message], inputs: dict[str, Any] | None
) -> Iterator[None]:
    """Refuse a stage that changes in place what its recomputation starts from.

    Args:
        stage: its name, for the error.
        messages: that came in.
        inputs: what the stage reads of the microbatch; None if it reads nothing.

    Raises:
        RuntimeError: if it does.
    """
    tensors = [t for message in messages for t in (*message.tensors, *message.side.values())]
    tensors += [t for t in (inputs or {}).values() if isinstance(t, torch.Tensor)]
    versions = [t._version for t in tensors]
    yield
    if versions != [t._version for t in tensors]:
        raise RuntimeError(
            f"stage {stage} changes its inputs in place, so its forward cannot be run again; "
            "plan it without recompute"
        )
