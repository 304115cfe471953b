"""Frozen encoder stages whose outputs are cached per item."""

from __future__ import annotations

from typing import Any

from raymm.actors.features.kept_features import KEYS, every_item
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.stage_inputs import joined, kept_entries


class FeatureStage(EncoderStage):
    """First stage of an encoder, with frozen blocks only. Computes every item separately."""

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        """Run one microbatch; the entry :data:`KEYS` of ``inputs`` has the items' storage keys, if
        any."""
        entries = {n: v for n, v in (inputs or {}).items() if n not in (KEYS, "sample_index")}
        run = super().run
        message = joined([run(item, received, context) for item in every_item(entries)])
        if self._whole:
            message = message._replace(side={})  # a projector reads only features
        if self._writer is not None and inputs is not None and KEYS in inputs:
            self._writer.keep(inputs[KEYS], kept_entries(message))
        return message

    @property
    def _whole(self) -> bool:
        return self._blocks[1] == self.spec.num_blocks
