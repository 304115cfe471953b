"""A frozen encoder without its projector, whose features are kept."""

from __future__ import annotations

from typing import Any

from raymm.actors.features.kept_features import KEYS, FeatureWriter, of_every_item
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.encoder import EncoderStage


class FeatureStage(EncoderStage):
    """All blocks of a frozen encoder. Computes every item by itself, and keeps what comes out.

    Attributes:
        writer: keeps features; None: nobody does, or another process.
    """

    writer: FeatureWriter | None = None

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        """Run one microbatch.

        Args:
            inputs: the encoder's keyword arguments; under :data:`KEYS` what its items are kept
                under, where they are to be.
            received: nothing.
            context: of the microbatch.
        """
        own = {n: v for n, v in (inputs or {}).items() if n not in (KEYS, "sample_index")}
        run = super().run
        hidden = of_every_item(lambda item: run(item, received, context).tensors[0], own)
        if self.writer is not None and inputs is not None and KEYS in inputs:
            self.writer.keep(inputs[KEYS], hidden)
        return Message((hidden,), {})
