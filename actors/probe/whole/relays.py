"""Which blocks' outputs are read by others than the next block, seen by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list
from raymm.actors.modules.cut import CutInfo, PassThrough, prune


class _Outputs:
    """In place of a passage: all blocks return leaves, whatever they are called with."""

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        self._shapes = shapes
        self.leaves: dict[int, torch.Tensor] = {}
        self.arrived: dict[int, torch.Tensor] = {}

    def passed(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.arrived[index] = hidden
        value, shape = hidden.detach().clone(), self._shapes.get(index, hidden.shape)
        if shape != value.shape:  # a block that is not as wide as the one before
            value = torch.ones(shape, dtype=value.dtype)
        self.leaves[index] = value.requires_grad_()
        return self.leaves[index].clone()  # models may change it in place


def read_outputs(
    model: nn.Module, blocks: str, tuple_length: int, run: Callable[[nn.Module], torch.Tensor],
    shapes: Mapping[int, torch.Size] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Blocks whose outputs are read by code after the next block, by their numbers.

    Args:
        model: whose blocks do not run: they may be without values. It is changed.
        blocks: dotted name of its list of blocks.
        tuple_length: of what a block returns; 0 of a tensor.
        run: calls it, and returns all that is read of its output.
        shapes: by block, of what it returns, where it is not as what it is called with.
    """
    total = len(block_list(model, blocks))
    outer = frozenset(n for n, _ in model.named_parameters() if not n.startswith(blocks + "."))
    prune(model, CutInfo(blocks, tuple_length, outer, outer, outer), total, total)
    outputs = _Outputs(shapes or {})
    for block in block_list(model, blocks):
        cast(PassThrough, block).passage = cast(Any, outputs)
    final = run(model)
    read: set[int] = set()
    for index, tensor in [*outputs.arrived.items(), (total, final)]:
        read |= set(_reached(tensor, outputs.leaves)) - {index - 1}
    return tuple(sorted(read))


def output_shapes(
    model: nn.Module, blocks: str, run: Callable[[nn.Module], torch.Tensor]
) -> dict[int, torch.Size]:
    """What :func:`read_outputs` is told of blocks that are not as wide as the one before: they run.

    Args:
        model: as made, of no use afterwards.
        blocks: dotted name of its list of blocks.
        run: calls it.
    """
    shapes: dict[int, torch.Size] = {}

    def note(index: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        if isinstance(hidden, torch.Tensor):
            shapes[index] = hidden.shape

    for index, block in enumerate(block_list(model, blocks)):
        block.register_forward_hook(lambda _, __, output, index=index: note(index, output))
    with torch.no_grad():
        run(model)
    return shapes


def _reached(output: torch.Tensor, leaves: dict[int, torch.Tensor]) -> list[int]:
    if not output.requires_grad or not leaves:
        return []
    gradients = torch.autograd.grad(
        output.sum(), list(leaves.values()), allow_unused=True, retain_graph=True
    )
    return [n for n, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
