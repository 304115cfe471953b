"""Base of all stages: receive a microbatch, run the module's part, return its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from raymm.actors.features.kept_features import FeatureWriter
from raymm.actors.modules.message import Message, MicrobatchContext, StageModule
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
