"""Forward of a stage's part of a module, with random numbers that do not depend on the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.cut import CutInfo, Passage
from raymm.actors.modules.draws import BlockDraws
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.modules.rotary import RotaryState


class PartForward:
    """Runs blocks [lo, hi) of a module and the code around them.

    Args:
        module: pruned to these blocks, or complete.
        cut: how the module was pruned; None if it is complete.
    """

    def __init__(
        self, name: str, module: nn.Module, cut: CutInfo | None, lo: int, hi: int
    ) -> None:
        self._name = name
        self._module = module
        self._blocks = cut.blocks if cut else find_blocks(module)
        self._passage = None if cut is None else Passage(module, cut, lo, hi)
        self._draws: BlockDraws | None = None
        self.rotary = RotaryState(module)

    def share_tokens(self) -> None:
        """Stop skipping blocks: processes that split tokens communicate in them."""
        if self._passage is not None:
            self._passage.stop_skipping()

    @property
    def blocks(self) -> str | None:
        """Dotted name of the list of blocks; None if there is none."""
        return self._blocks

    def __call__(
        self, received: torch.Tensor | None, context: MicrobatchContext,
        relays: Sequence[torch.Tensor] = (), **inputs: Any,
    ) -> Any:  # fmt: skip
        """Run one microbatch and return the module's output, if the part has its last block.

        Args:
            received: hidden state from the previous stage; None in the first one.
            relays: outputs of earlier blocks, received with the hidden state.
            **inputs: keyword arguments of the module.

        Raises:
            ForwardLeft: the part ends before the last block.
            InputError: the module is cut, and the forward skipped all of its blocks.
        """
        self._draw_as(context)
        if self._passage is None:
            return self._module(**inputs)
        description = f"the forward of {self._name!r} in microbatch {context.microbatch}"
        with self._passage.open(received, description, relays):
            return self._module(**inputs)

    def _draw_as(self, context: MicrobatchContext) -> None:
        if self._draws is None and context.draws is not None and self._blocks is not None:
            self._draws = BlockDraws(block_list(self._module, self._blocks))
        if self._draws is not None:
            self._draws.use(context.draws)
        context.enter("module")

    def detach(self) -> None:
        """Restore the state of a complete module."""
        self.rotary.detach()
        if self._draws is not None:
            self._draws.remove()
            self._draws = None
