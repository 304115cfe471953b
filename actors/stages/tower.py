"""Stages of a tower of a whole model, which end in what its language model is handed of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.modules.cut import CutReached
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.sharding.whole.item_rows import gather_parts, items_of_share
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.features import Form
from raymm.actors.stages.item_shares import ITEMS
from raymm.actors.stages.stage_inputs import from_side, to_side
from raymm.kernels.collectives.gather_tokens import contribute_once
from raymm.kernels.host_copies import on_host


@dataclass(frozen=True)
class TowerSpec(EncoderSpec):
    """A tower as data that a rank can build its part from. Its source is a
    :class:`raymm.actors.weights.model_part.PartSource`, whose call makes the features.

    Attributes:
        constants: arguments of the call that are the same for all microbatches.
        form: structure of what the call returns.
        layers: which of it are lists with an entry of all items, where others have one of each;
            known where processes are to share items.
        zeros_left_out: whether nothing comes of items of nothing but zeros (padding of samples
            with fewer); known as ``layers``.
    """

    constants: tuple[tuple[str, Any], ...] = ()
    form: Form | None = None
    layers: frozenset[int] = frozenset()
    zeros_left_out: bool = False


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
            items = None
            if self._items is not None:
                inputs, items = items_of_share(
                    spec.name, inputs, self._items.rank, self._items.processes,
                    spec.zeros_left_out,
                )
            side = to_side(inputs, spec.travels, spec.name) if self._cut else {}
            if items is not None:
                side[ITEMS] = torch.tensor(items, device="cpu")
        else:
            (message,) = received.values()
            (hidden, *relays), side = message.tensors, dict(message.side)
            shown = {name: value for name, value in side.items() if name != ITEMS}
            inputs = from_side(shown, hidden.device)
        try:
            with self._sharing or nullcontext():
                output = self._forward(hidden, context, relays, **inputs, **dict(spec.constants))
        except CutReached as cut:
            return Message((cut.hidden, *cut.relays), side)
        return self._features(output, side)

    def _features(self, output: Any, side: dict[str, torch.Tensor]) -> Message:
        """What the language model is handed, of all items."""
        form = self.spec.form
        assert form is not None  # see run
        tensors, own = form.packed(output)
        if self._exchange is not None:
            tensors = tuple(contribute_once(tensor, self._exchange) for tensor in tensors)
        if self._items is None:
            return Message(tensors, own)
        parts = form.parts(tensors, own, self.spec.layers)
        if not int(on_host(side[ITEMS])):  # another's item, in vain
            parts = [part[:0] for part in parts]
        whole = gather_parts(parts, self._items.exchange)
        return Message(*form.of_parts(whole, own, self.spec.layers))
