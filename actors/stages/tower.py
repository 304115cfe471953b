"""Stages of a tower of a whole model, which end in what its language model is handed of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raymm.actors.modules.cut import CutReached
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.features import Form
from raymm.actors.stages.stage_inputs import from_side, to_side


@dataclass(frozen=True)
class TowerSpec(EncoderSpec):
    """A tower as data that a rank can build its part from. Its source is a
    :class:`raymm.actors.weights.model_part.PartSource`, whose call makes the features.

    Attributes:
        constants: arguments of the call that are the same for all microbatches.
        form: structure of what the call returns.
    """

    constants: tuple[tuple[str, Any], ...] = ()
    form: Form | None = None


class TowerStage(EncoderStage):
    """Blocks [lo, hi) of a tower.

    Args:
        spec: of the whole tower.
        lo, hi, module, projector: as of :class:`EncoderStage`; there is no projector.
    """

    spec: TowerSpec

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """Run one microbatch.

        Args:
            inputs: arguments of the call, of the tower's first stage.
            received: the message of the stage before.
            context: of the microbatch.

        Raises:
            FeaturesError: features of another structure than that of the probe.
        """
        spec = self.spec
        assert self._forward is not None and spec.form is not None  # it has blocks, and was tried
        hidden, relays = None, ()
        if self.first:
            inputs = {k: v for k, v in (inputs or {}).items() if k != "sample_index"}
            side = to_side(inputs, spec.travels, spec.name) if self._cut else {}
        else:
            (message,) = received.values()
            (hidden, *relays), side = message.tensors, message.side
            inputs = from_side(side, hidden.device)
        try:
            output = self._forward(hidden, context, relays, **inputs, **dict(spec.constants))
        except CutReached as cut:
            return Message((cut.hidden, *cut.relays), side)
        return Message(*spec.form.packed(output))
