"""Stages of a Hugging Face VLM's tower; the last one outputs the features for the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raymm.actors.features.kept_features import KEYS
from raymm.actors.features.root_features import FEATURE, RootCall, RootForm
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.sharding.vlm.item_rows import (
    each_item,
    gather_parts,
    items_of_share,
    share_lengths,
)
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage, later_inputs
from raymm.actors.stages.features import Form
from raymm.actors.stages.item_shares import ITEMS, ItemShares
from raymm.actors.stages.stage import Call
from raymm.actors.stages.stage_inputs import from_side, to_side
from raymm.actors.weights.model_part import PartSource
from raymm.errors import ForwardLeft, InternalError
from raymm.kernels.collectives.gather import contribute_once
from raymm.kernels.host_copies import on_host, to_device

_THERE, _OUTLINED = "there/", 2


@dataclass(frozen=True)
class TowerSpec(EncoderSpec):
    """Description of a tower, whose source is a
    :class:`raymm.actors.weights.model_part.PartSource`.

    Attributes:
        constants: arguments of the call that are the same for all microbatches.
        form: structure of the call's output.
        layers: leaves that are lists with an entry per layer for all items, rather than an entry
            per item; set if items are split over processes, like ``zeros_left_out``.
        zeros_left_out: True if items that are all zeros (padding) give no features.
        root: output structure of the frozen part, if its features are cached.
    """

    constants: tuple[tuple[str, Any], ...] = ()
    form: Form | None = None
    layers: frozenset[int] = frozenset()
    zeros_left_out: bool = False
    root: RootForm | None = None


class TowerStage(EncoderStage):
    """Blocks [lo, hi) of a tower, without projector."""

    spec: TowerSpec

    def _of_samples(self, inputs: dict[str, Any], context: MicrobatchContext) -> dict[str, Any]:
        """Return the inputs unchanged: samples of towers are not split by a plan."""
        return inputs

    def _own_items(
        self, inputs: dict[str, Any], items: ItemShares
    ) -> tuple[dict[str, Any], int]:
        spec = self.spec
        return items_of_share(
            spec.name, inputs, items.rank, items.processes, spec.zeros_left_out
        )

    def _resume(self, received: dict[str, Message]) -> Call:
        (message,) = received.values()
        hidden, *relays = message.tensors
        return Call(hidden, later_inputs(message.side, hidden), dict(message.side), {}, relays)

    def forward(self, call: Call, context: MicrobatchContext) -> Any:
        inputs = {**call.inputs, **dict(self.spec.constants)}
        return super().forward(replace(call, inputs=inputs), context)

    def pass_on(self, left: ForwardLeft, call: Call) -> Message:
        return Message((left.value, *left.relays), call.side)

    def outputs(self, output: Any, call: Call, context: MicrobatchContext) -> Message:
        """Return the message to the language model, with the features of all items.

        Raises:
            ModelError: the features have another structure than in the probe.
        """
        form = self.spec.form
        assert form is not None  # a probed tower
        tensors, form_side = form.packed(output)
        if self._exchange is not None:
            tensors = tuple(contribute_once(tensor, self._exchange) for tensor in tensors)
        if self._items is None:
            return Message(tensors, form_side)
        shards = form.parts(tensors, form_side, self.spec.layers)
        # Without own items, the process ran another process's one.
        if not int(on_host(call.side[ITEMS])):
            shards = [shard[:0] for shard in shards]
        gathered = gather_parts(shards, self._items.exchange)
        return Message(*form.of_parts(gathered, form_side, self.spec.layers))

    def split_items(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], message: Message
    ) -> list[Message]:
        form, layers = self.spec.form, self.spec.layers
        assert form is not None  # a probed tower
        parts = form.parts(message.tensors, message.side, layers)
        entries = [{n: v for n, v in rows.items() if n != "sample_index"} for rows in inputs]
        lengths = share_lengths(self.spec.name, entries, list(map(len, parts)))
        shares = [part.split(rows) for part, rows in zip(parts, lengths, strict=True)]
        return [
            Message(*form.of_parts(share, message.side, layers))
            for share in zip(*shares, strict=True)
        ]


def features_of_items(
    module: nn.Module, form: RootForm, name: str, inputs: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> list[list[torch.Tensor]]:
    """Run a tower's frozen part on every item separately and return the features.

    Args:
        module: the tower; its frozen part must be replaced by a :class:`RootCall` that runs it.
        form: output structure of the frozen part.
        constants: arguments that are the same for all microbatches.

    Raises:
        ModelError: the features of an item have another structure than in the probe.
    """
    items = []
    for item in each_item(name, inputs, form.zeros_left_out):
        try:
            with torch.no_grad():
                module(**item, **constants)
        except ForwardLeft as reached:
            items.append(form.features(reached.value))
        else:
            raise InternalError(f"{form.place} of {name!r} was not called")
    return items


class FeaturedTowerStage(TowerStage):
    """Complete tower that runs its frozen part per item, and only on items without cached
    features."""

    def __init__(
        self, spec: TowerSpec, lo: int, hi: int, module: nn.Module | None,
        projector: nn.Module | None,
    ) -> None:
        assert spec.root is not None and module is not None
        self._root = RootCall(module, spec.root.place)
        if isinstance(spec.source, PartSource) and spec.source.call is not None:
            spec.source.called(module)  # the call may be that of the frozen part
        super().__init__(spec, lo, hi, module, projector)

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        """Run one microbatch.

        Args:
            inputs: arguments of the call, with the storage keys of the items' features under
                :data:`KEYS`; or the return value of :func:`featured_inputs`.
        """
        spec, module = self.spec, self.module
        assert spec.root is not None and module is not None and self._forward is not None
        shown = {k: v for k, v in (inputs or {}).items() if k not in (KEYS, "sample_index")}
        features = [shown.pop(n) for n in sorted(shown, key=_number) if n.startswith(FEATURE)]
        device = next(module.parameters()).device
        if not features:
            constants = dict(spec.constants)
            items = features_of_items(module, spec.root, spec.name, shown, constants)
            self._keep((inputs or {}).get(KEYS, ()), items)
            features = spec.root.together(items)
            shown = outlines(spec.name, shown)
        arguments = of_outlines(shown, device)
        cached = spec.root.output([to_device(each, device) for each in features])
        with self._root.returning(cached):
            output = self._forward(None, context, (), **arguments, **dict(spec.constants))
        return self.outputs(output, Call(None, arguments, {}), context)

    def _keep(self, keys: Sequence[str], items: Sequence[Sequence[torch.Tensor]]) -> None:
        if self._writer is None or not keys:
            return
        for key, tensors in zip(keys, items, strict=True):
            self._writer.keep([key], {str(n): tensor[None] for n, tensor in enumerate(tensors)})


def _number(name: str) -> tuple[int, str]:
    return int(name.removeprefix(FEATURE)) if name.startswith(FEATURE) else -1, name


def featured_inputs(
    name: str, inputs: Mapping[str, torch.Tensor], features: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a tower's inputs for items with cached features: the features and :func:`outlines`."""
    feature_entries = {f"{FEATURE}{number}": tensor for number, tensor in enumerate(features)}
    return {**outlines(name, inputs), **feature_entries}


def outlines(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a tower's inputs without the values of floats.

    Floats are replaced by their shapes and by a mask that shows which entries of the first two
    dimensions are not all zero. All-zero entries pad samples with fewer items.
    """
    nonzero = {
        _THERE + entry: (value != 0).flatten(_OUTLINED).any(dim=-1)
        for entry, value in inputs.items()
        if value.is_floating_point() and value.dim() > _OUTLINED
    }
    return {**to_side(inputs, (), name), **nonzero}


def of_outlines(side: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Rebuild inputs from :func:`outlines`: ones that take no memory for non-zero entries, else
    zeros."""
    inputs = from_side({n: v for n, v in side.items() if not n.startswith(_THERE)}, device)
    for name, value in side.items():
        if name.startswith(_THERE):
            entry = name.removeprefix(_THERE)
            ghost = inputs[entry]
            ones = to_device(value, device).to(ghost.dtype)
            inputs[entry] = ones[(..., *[None] * (ghost.dim() - _OUTLINED))].expand(ghost.shape)
    return inputs


def is_featured(inputs: Mapping[str, Any]) -> bool:
    """Return True if a tower's inputs come from :func:`featured_inputs`."""
    return any(name.startswith(FEATURE) for name in inputs)
