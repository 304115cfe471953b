"""Detection, by gradients, of blocks whose outputs are not only read by the next block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list
from raymm.actors.modules.cut import CutInfo, PassThrough, prune


class _Outputs:
    """Replacement for a passage: all blocks return leaf tensors, whatever their input."""

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        self._shapes = shapes
        self.leaves: dict[int, torch.Tensor] = {}
        self.arrived: dict[int, torch.Tensor] = {}

    def passed(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.arrived[index] = hidden
        value, shape = hidden.detach().clone(), self._shapes.get(index, hidden.shape)
        if shape != value.shape:  # output shape differs from the input
            value = torch.ones(shape, dtype=value.dtype)
        self.leaves[index] = value.requires_grad_()
        return self.leaves[index].clone()  # models may change it in place


def read_outputs(
    model: nn.Module, blocks: str, tuple_length: int, run: Callable[[nn.Module], torch.Tensor],
    shapes: Mapping[int, torch.Size] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the blocks whose outputs are read by code after the next block.

    Args:
        model: modified; its blocks do not run and may have no values.
        tuple_length: length of a block's output tuple; 0 for a tensor.
        run: calls the model and returns all parts of its output that are read.
        shapes: output shapes of blocks that change the shape.
    """
    total = len(block_list(model, blocks))
    outer = frozenset(n for n, _ in model.named_parameters() if not n.startswith(blocks + "."))
    prune(model, CutInfo(blocks, tuple_length, outer, outer, outer), total, total)
    outputs = _Outputs(shapes or {})
    for block in block_list(model, blocks):
        cast(PassThrough, block).set_passage(cast(Any, outputs))
    final = run(model)
    read: set[int] = set()
    for index, tensor in [*outputs.arrived.items(), (total, final)]:
        read |= set(_reached(tensor, outputs.leaves)) - {index - 1}
    return tuple(sorted(read))


def output_shapes(
    model: nn.Module, blocks: str, run: Callable[[nn.Module], torch.Tensor]
) -> dict[int, torch.Size]:
    """Return block output shapes for :func:`read_outputs`, by running the model."""
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
