"""Base of all stages: receive a microbatch, run the module's part, return its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.features.kept_features import FeatureWriter
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.cut import CutInfo, Passage
from raymm.actors.modules.draws import BlockDraws
from raymm.actors.modules.message import Message, MicrobatchContext, StageModule
from raymm.actors.modules.rotary import RotaryState
from raymm.actors.sharding.fully_sharded import FullyShardedPlan, shard_parameters
from raymm.actors.stages.stage_hook import StageHooks
from raymm.errors import ForwardLeft


@dataclass(frozen=True)
class Call:
    """Call of a stage's part of a module for one microbatch.

    Attributes:
        hidden: hidden state from the previous stage; None in the first stage.
        inputs: keyword arguments of the module.
        side: tensors without gradient that later stages need.
        ports: inputs with a gradient that layers of later stages read.
        relays: outputs of earlier blocks that later blocks read.
        done: True if ``hidden`` is the module's output, which was cached.
    """

    hidden: torch.Tensor | None
    inputs: dict[str, Any]
    side: dict[str, Any]
    ports: Mapping[str, torch.Tensor] = field(default_factory=dict)
    relays: Sequence[torch.Tensor] = ()
    done: bool = False


class Stage(StageModule):
    """Part of a module between two cuts; subclasses implement the steps of a microbatch."""

    module: Any
    _hooks: StageHooks | None = None
    _writer: FeatureWriter | None = None

    def attach_hooks(self, hooks: StageHooks | None) -> None:
        """Apply a user's changes of the module's inputs and outputs, if there are any."""
        self._hooks = hooks

    def keep_features(self, writer: FeatureWriter) -> None:
        """Store the outputs of a frozen part, if the stage caches features."""
        self._writer = writer

    def shard_parameters(
        self, plans: Mapping[str, FullyShardedPlan], group: dist.ProcessGroup,
        device: torch.device, compute_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Shard the module's parameters over a group with FSDP; projectors are not sharded.

        Args:
            plans: plan of the spec's entire module under ``"module"``.
            compute_dtype: dtype in which matrices are gathered; None keeps their dtype.
        """
        shard_parameters(self, self.module, plans["module"], group, device, compute_dtype)

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """Run one microbatch; see :meth:`receive` for the arguments."""
        hooks = self._hooks
        if hooks is not None:
            inputs = hooks.changed_inputs(inputs, context)
        call = self.receive(inputs or {}, received, context)
        try:
            output = self.forward(call, context)
        except ForwardLeft as left:
            return self.pass_on(left, call)
        message = self.outputs(output, call, context)
        return message if hooks is None else hooks.changed_outputs(message, context)

    def receive(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> Any:
        """Return the :class:`Call` for the inputs and the messages by producer."""
        raise NotImplementedError

    def forward(self, call: Any, context: MicrobatchContext) -> Any:
        """Return the module's output. Raises ForwardLeft if other stages have its last block."""
        raise NotImplementedError

    def pass_on(self, left: ForwardLeft, call: Any) -> Message:
        """Return the message to the module's next stage."""
        raise NotImplementedError

    def outputs(self, output: Any, call: Any, context: MicrobatchContext) -> Message:
        """Return the message of the module's last stage."""
        raise NotImplementedError


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
