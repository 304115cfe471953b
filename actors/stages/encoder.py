"""Encoder stages: blocks of an encoder, its projector, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raymm.actors.adapters.lora import disable_dropout
from raymm.actors.features.kept_features import FEATURES
from raymm.actors.modules.cut import CutInfo, stage_parameters
from raymm.actors.modules.message import Message, MicrobatchContext, first_tensor
from raymm.actors.modules.module_state import may_draw
from raymm.actors.modules.projector import Projector
from raymm.actors.sharding.shared_items import ProcessPeers, SharedItems
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.sharding.tensor_shard import shard_module
from raymm.actors.stages.item_shares import ITEMS, ItemShares, sample_rows, share_of_rows
from raymm.actors.stages.stage import Call, PartForward, Stage
from raymm.actors.stages.stage_inputs import (
    Reads,
    from_side,
    from_stages,
    ghosts,
    message_of,
    message_of_entries,
    shown_inputs,
    shown_output,
    to_side,
)
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ForwardLeft, ModelError
from raymm.kernels.collectives.gather import contribute_once
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.shared_draws import Grid, set_grid
from raymm.scheduler.graph.module_graph import Port


@dataclass(frozen=True)
class EncoderSpec:
    """Description of an encoder with its projector; a rank builds its part from this data.

    Callbacks follow Cornstarch v1, Listing 2: ``preprocess(inputs) -> inputs`` before the encoder,
    ``postprocess_module(inputs, output) -> output`` after it, ``postprocess_projector(inputs,
    output) -> output`` after the projector. If the chain is cut,
    :mod:`raymm.actors.probe.callbacks` determines ``cut``, ``travels`` and ``lost``.

    Attributes:
        travels: floating-point inputs whose values later stages need.
        lost: output fields that are incomplete on the module's last stage.
        ports: inputs with a gradient that layers of later stages read.
        optional: True if the model may ignore the encoder's features.
    """

    name: str
    source: ModuleSource
    num_blocks: int
    projector: ModuleSource | None = None
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    postprocess_module: Callable[[dict[str, Any], Any], Any] | None = None
    postprocess_projector: Callable[[dict[str, Any], Any], Any] | None = None
    cut: CutInfo | None = None
    travels: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    ports: tuple[Port, ...] = ()
    optional: bool = False
    disable_dropout: bool = False

    @property
    def num_layers(self) -> int:
        return self.num_blocks + (self.projector is not None)


def later_inputs(side: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> dict[str, Any]:
    """Return the module's arguments that came with a hidden state."""
    return from_side({name: value for name, value in side.items() if name != ITEMS}, hidden.device)


def token_features(output: Any) -> torch.Tensor:
    """Return encoder output (B, T, C); flatten maps (B, C, H, W), and make vectors (B, C) one
    token."""
    features = first_tensor(output)
    if features.dim() == 4:
        return features.flatten(2).transpose(1, 2)
    return features[:, None] if features.dim() == 2 else features


class EncoderStage(Stage):
    """Layers [lo, hi) of an encoder chain: its blocks, then its projector as the last layer.

    A complete chain (0, ``num_layers``) is the single-process reference. A stage with only the
    projector ignores ``module``.
    """

    def __init__(
        self, spec: EncoderSpec, lo: int, hi: int, module: nn.Module | None,
        projector: nn.Module | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.module = module if lo < spec.num_blocks else None
        self.projector = projector if hi > spec.num_blocks else None
        if spec.disable_dropout:
            disable_dropout(self)
        self.first = lo == 0
        self._blocks = lo, min(hi, spec.num_blocks)
        self._exchange: Exchange | None = None
        self._items: ItemShares | None = None
        self._sharing: SharedItems | None = None
        self._forward: PartForward | None = None
        if self.module is not None:
            uncut = self._blocks == (0, spec.num_blocks)
            self._forward = PartForward(
                spec.name, self.module, None if uncut else spec.cut, *self._blocks
            )

    @property
    def hands_on_features(self) -> bool:
        """True if the stage outputs token features, False for the raw module output."""
        return True

    @property
    def optional(self) -> bool:
        """True if the stage's output may have no gradient because no other module uses it."""
        return self.spec.optional

    @contextmanager
    def callbacks_wrapped(
        self, wrap: Callable[[Callable | None], Callable | None]
    ) -> Iterator[None]:
        """Context manager that replaces the spec's callbacks by ``wrap(callback)``."""
        spec = self.spec
        self.spec = replace(
            spec, preprocess=wrap(spec.preprocess),
            postprocess_module=wrap(spec.postprocess_module),
            postprocess_projector=wrap(spec.postprocess_projector),
        )
        try:
            yield
        finally:
            self.spec = spec

    def detach(self) -> None:
        """Restore the module: the single-process reference builds a stage per forward."""
        if self._forward is not None:
            self._forward.detach()

    @classmethod
    def build(cls, spec: EncoderSpec, lo: int, hi: int) -> EncoderStage:
        """Build only the parts that layers [lo, hi) need."""
        module = None
        if lo < spec.num_blocks:
            uncut = lo == 0 and hi >= spec.num_blocks
            stage_part = None
            if not uncut:
                assert spec.cut is not None  # a module without cut is one stage
                stage_part = Part(spec.cut, lo, min(hi, spec.num_blocks))
            module = spec.source.build(stage_part)
        projector = None
        if spec.projector is not None and hi > spec.num_blocks:
            projector = spec.projector.build()
        return cls(spec, lo, hi, module, projector)

    def shard_tensors(self, plans: Mapping[str, TensorPlan], group: TensorGroup) -> None:
        """Shard the parameters over a tensor-parallel group.

        ``plans`` has the plan of the module under ``"module"`` and that of the projector under
        ``"projector"``.
        """
        self.is_shared = True
        if self.module is not None:
            shard_module(self.module, plans["module"], group)
        if self.projector is not None:
            shard_module(self.projector, plans["projector"], group)

    def share_tokens(self, exchange: Exchange) -> None:
        """Split every item's tokens over a group of processes (context parallelism).

        All processes get the same inputs and the same gradient of the output, which is complete
        features from the module's last block on, and the process's own tokens before. Parameter
        gradients are partial sums. :func:`raymm.actors.probe.items.probe_shared_items` checks
        encoders.
        """
        self._exchange, self.is_shared = exchange, True
        if self.module is None or self._forward is None:
            return
        self._forward.share_tokens()
        trains = any(p.requires_grad for p in self.module.parameters())
        peers = ProcessPeers(exchange, backward=trains)
        blocks = self._forward.blocks
        assert blocks is not None  # the probe rejects encoders without blocks
        self._sharing = SharedItems(self.module, blocks, *self._blocks, peers)

    def share_samples(self, exchange: Exchange) -> None:
        """Split every microbatch's items over a group of processes.

        All processes get the same inputs and the same gradient of the last stage's output, which
        has all items; earlier stages output their own items. Parameter gradients are partial sums.
        """
        self._items, self.is_shared = ItemShares(self.spec.name, exchange), True

    @property
    def may_draw(self) -> bool:
        """True if trainable parts other than simple projectors, or callbacks, may draw random
        numbers."""
        spec = self.spec
        callbacks = spec.preprocess, spec.postprocess_module, spec.postprocess_projector
        modules = [module for module in (self.module, self.projector) if module is not None]
        return any(callbacks) or any(may_draw(module, (Projector,)) for module in modules)

    def receive(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> Call:
        """Return the call of the module.

        Args:
            inputs: the encoder's keyword arguments on the first stage; then those that callbacks
                read.
            received: message of the previous stage, keyed by module name.
        """
        preprocess = self.spec.preprocess
        self._set_rows(context, {})
        if FEATURES in inputs:
            cached = message_of_entries(inputs)
            if not cached.side:
                return Call(cached.tensors[0], {}, {}, done=True)
            received = {self.spec.name: cached}
            if self.first:  # a complete chain: zero inputs, to infer shapes
                inputs, preprocess = from_side(cached.side, cached.tensors[0].device), None
        call = self._begin(inputs, preprocess, context) if self.first else self._resume(received)
        self._set_rows(context, call.side)
        return call

    def _begin(
        self, inputs: dict[str, Any], preprocess: Callable | None, context: MicrobatchContext
    ) -> Call:
        """Return the call of the first stage, for the items of this process."""
        inputs = {k: v for k, v in inputs.items() if k != "sample_index"}
        if context.samples:
            inputs = self._of_samples(inputs, context)
        if preprocess is not None:
            context.enter("preprocess")
            inputs = preprocess(inputs)
        items = {}
        if self._items is not None:
            inputs, count = self._own_items(inputs, self._items)
            items[ITEMS] = torch.tensor(count, device="cpu")
        ports = {p.name: inputs[p.name] for p in self.spec.ports if p.name in inputs}
        model_inputs = {name: value for name, value in inputs.items() if name not in ports}
        side = to_side(model_inputs, self.spec.travels, self.spec.name) if self._cut else {}
        return Call(None, inputs, side | items, ports)

    def _own_items(
        self, inputs: dict[str, Any], items: ItemShares
    ) -> tuple[dict[str, Any], int]:
        """Return the inputs of this process's items, and the value of :data:`ITEMS`."""
        return items.own_inputs(inputs)

    def _resume(self, received: dict[str, Message]) -> Call:
        """Return the call of a stage after the first."""
        hidden, side, ports = from_stages(received, self.spec.name)
        return Call(hidden, later_inputs(side, hidden) | ports, side, ports)

    def forward(self, call: Call, context: MicrobatchContext) -> Any:
        if self._forward is None or call.done:
            return call.hidden
        with self._sharing or nullcontext():
            return self._forward(call.hidden, context, call.relays, **call.inputs)

    def pass_on(self, left: ForwardLeft, call: Call) -> Message:
        return message_of(left.value, call.ports, call.side, self.optional)

    def outputs(self, output: Any, call: Call, context: MicrobatchContext) -> Message:
        """Apply callbacks, and the projector if the stage has it."""
        if self._forward is not None and not call.done:
            if self._sharing is not None and getattr(output, "hidden_states", None) is not None:
                raise ModelError(
                    f"{self.spec.name} returns the hidden states of all its blocks, but with cp "
                    "above 1 each process has only its own tokens of them; accepted: a model that "
                    "returns its last hidden state only (output_hidden_states=False), or cp 1"
                )
            output = self._after_module(output, call, context)
            if not self.hands_on_features:
                return self._finished(output, call, context)
            output = token_features(output)
        if self.projector is not None:
            context.enter("projector")
            output = self.projector(output)
            if self.spec.postprocess_projector is not None:
                context.enter("postprocess_projector")
                with Reads("postprocess_projector", self.spec.name).observed() as reads:
                    shown = self._shown(call, reads)
                    output = first_tensor(self.spec.postprocess_projector(shown, output))
        if self._exchange is not None:
            output = contribute_once(output, self._exchange)
        if self._unfinished:
            return message_of(output, {}, call.side, self.optional)
        return self._finished(output, call, context)

    def split_items(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], message: Message
    ) -> list[Message]:
        """Return the messages of several microbatches, whose features have a row per item.

        Raises:
            ModelError: the message does not have one row per item.
        """
        counts = [min(len(v) for v in rows.values() if torch.is_tensor(v)) for rows in inputs]
        if message.side or any(len(tensor) != sum(counts) for tensor in message.tensors):
            shapes = [tuple(tensor.shape) for tensor in message.tensors]
            raise ModelError(
                f"{self.spec.name!r} returns features of shapes {shapes} for {sum(counts)} items; "
                "accepted with microbatch_factor above 1: one row per item (items, tokens, width)"
            )
        return [
            message._replace(tensors=tensors)
            for tensors in zip(*[t.split(counts) for t in message.tensors], strict=True)
        ]

    def _finished(self, output: Any, call: Call, context: MicrobatchContext) -> Message:
        """Return the message of the module's last stage.

        Raises:
            ModelError: processes split items, and the output does not have one row per item.
        """
        hidden = output if self._items is None else self._items.whole(output, call.side)
        if context.samples and len(hidden) != context.own_rows(self.spec.name).size:
            raise ModelError(
                f"{self.spec.name!r} returns features of shape {tuple(hidden.shape)} for "
                f"{context.own_rows(self.spec.name).size} items; where microbatches are split by "
                "samples, accepted: (items, tokens, width)"
            )
        return message_of(hidden, {}, {}, self.optional)

    def _after_module(self, output: Any, call: Call, context: MicrobatchContext) -> Any:
        callback = self.spec.postprocess_module
        if callback is None:
            return output
        context.enter("postprocess_module")
        with Reads("postprocess_module", self.spec.name).observed() as reads:
            if self._blocks[0] > 0:
                output = shown_output(output, self.spec.lost, reads)
            return callback(self._shown(call, reads), output)

    def _shown(self, call: Call, reads: Reads) -> dict[str, Any]:
        """Return inputs for callbacks; reading a value that this stage lacks raises."""
        return call.inputs if self.first else shown_inputs(call.inputs, ghosts(call.side), reads)

    def _of_samples(self, inputs: dict[str, Any], context: MicrobatchContext) -> dict[str, Any]:
        """Select the items of the stage's samples."""
        rows = context.own_rows(self.spec.name)
        return {name: value[slice(*rows)] for name, value in inputs.items()}

    def _set_rows(self, context: MicrobatchContext, side: Mapping[str, torch.Tensor]) -> None:
        """Slice all random numbers drawn from now on by the items of this process."""
        if self._items is None or ITEMS not in side:
            rows = sample_rows(context, self.spec.name, self._row_count(context))
            set_grid(None if rows.is_uncut else Grid(rows))
            return
        local_items, count = self._items.own(side), int(side[ITEMS])
        rows = share_of_rows(
            sample_rows(context, self.spec.name, count),
            local_items.start if local_items else 0, max(len(local_items), 1),
        )
        set_grid(Grid(rows))

    def _row_count(self, context: MicrobatchContext) -> int:
        return context.own_rows(self.spec.name).size if context.samples else 1

    @property
    def _unfinished(self) -> bool:
        return self.projector is None and self.spec.projector is not None

    @property
    def _cut(self) -> bool:
        """True if other stages of the module follow this stage."""
        return self._blocks[1] < self.spec.num_blocks or self._unfinished


def encoder_stage_parameters(spec: EncoderSpec, lo: int, hi: int) -> list[str]:
    """Return the parameter names, relative to the chain, that layers [lo, hi) own."""
    names = []
    if lo < spec.num_blocks:
        skeleton = spec.source.skeleton()
        if lo == 0 and hi >= spec.num_blocks:
            owned = [name for name, _ in skeleton.named_parameters()]
        else:
            assert spec.cut is not None
            owned = stage_parameters(skeleton, spec.cut, lo, min(hi, spec.num_blocks))
        names += [f"module.{name}" for name in owned]
    if spec.projector is not None and hi > spec.num_blocks:
        names += [f"projector.{n}" for n, _ in spec.projector.skeleton().named_parameters()]
    return names
