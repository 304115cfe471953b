"""Protection of a stage's state during a run: mode, statistics, inputs and random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from raymm.actors.modules.message import Message
from raymm.scheduler.plan.stage import StageId

_DRAWLESS = frozenset({
    nn.Identity, nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm,
    nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GELU, nn.ReLU, nn.SiLU,
    nn.Tanh, nn.Sigmoid, nn.Sequential, nn.ModuleList,
})  # fmt: skip


def may_draw(module: nn.Module, drawless: Collection[type] = ()) -> bool:
    """Return True if a part in training mode, other than drawless layers, may draw random numbers.
    """
    return any(
        child.training and type(child) not in _DRAWLESS and type(child) not in drawless
        for child in module.modules()
    )


@contextlib.contextmanager
def evaluating(stages: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context manager that puts modules in eval mode and restores train mode afterwards."""
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
    """Context manager for forwards that must not update running statistics (batch norm). Buffers
    are replaced by copies, not restored, because autograd may have saved them."""
    saved = [
        (module, dict(module._buffers))
        for module in stage.modules()
        if isinstance(module, _NormBase) and module.training
    ]
    for module, buffers in saved:
        module._buffers.update({n: None if b is None else b.clone() for n, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)


class ForwardBuffers:
    """Buffers that training forwards change (batch norm, spectral norm), for forwards that run
    twice. A second run starts from the values before its first run. Afterwards, the values left by
    all first runs are restored."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: list[tuple[nn.Module, str]] | None = None  # set after one forward

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[tuple[nn.Module, str, torch.Tensor]]]:
        """Context manager for a first run; yields the argument of :meth:`restored`, filled in
        afterwards."""
        buffers = self._changing
        if buffers is None:
            buffers = [
                (child, name) for child in self._module.modules() if child.training
                for name, buffer in child._buffers.items() if buffer is not None
            ]
        values = [(child, name, child.get_buffer(name).clone()) for child, name in buffers]
        yield values
        if self._changing is None:
            values[:] = [
                (child, name, value) for child, name, value in values
                if not torch.equal(value, child.get_buffer(name))
            ]
            self._changing = [(child, name) for child, name, _ in values]

    @contextlib.contextmanager
    def restored(self, before: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
        """Context manager for a second run, with the value recorded in the first run. Buffers are
        replaced, not written, because autograd may have saved them."""
        current = [(child, name, child._buffers[name]) for child, name, _ in before]
        for child, name, buffer in before:
            child._buffers[name] = buffer
        try:
            yield
        finally:
            for child, name, buffer in current:
                child._buffers[name] = buffer


@contextlib.contextmanager
def inputs_unchanged(
    stage: StageId, messages: Collection[Message], inputs: dict[str, Any] | None
) -> Iterator[None]:
    """Raise RuntimeError if a stage changes the inputs of its recomputation in place."""
    tensors = [t for message in messages for t in (*message.tensors, *message.side.values())]
    tensors += [t for t in (inputs or {}).values() if isinstance(t, torch.Tensor)]
    versions = [t._version for t in tensors]
    yield
    if versions != [t._version for t in tensors]:
        raise RuntimeError(
            f"stage {stage} changes its inputs in place, so its forward cannot be run again; "
            "plan it without recompute"
        )
