"""Stages of a module of a graph: whole, or some of its blocks.

What the module reads of others, and of the batch, its first stage has; its last one hands on what
it returns, by names, and has its loss, if it computes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.message_samples import shape_entry
from raymm.actors.modules.node import (
    ONLY,
    NodeSpec,
    Tensors,
    arguments_of,
    inputs_left_alone,
    outputs_of,
)
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.stage_inputs import from_side
from raymm.kernels.collectives.gather_tokens import CONTRIBUTOR, contribute_once
from raymm.scheduler.graph.sample_ranges import Range


@dataclass(frozen=True)
class NodeStageSpec(EncoderSpec):
    """A module of a graph as data that a rank can build its part from.

    Attributes:
        node: what it reads and hands on.
        chain: it is an encoder with projector and callbacks, and hands on their features;
            otherwise what the module returns.
    """

    node: NodeSpec | None = None
    chain: bool = False


class NodeStage(EncoderStage):
    """Layers [lo, hi) of a module of a graph.

    Args:
        spec: of the whole module.
        lo, hi, module, projector: as of :class:`EncoderStage`.
    """

    spec: NodeStageSpec
    _rows: int | None = None  # samples of the microbatch that it runs

    @property
    def node(self) -> NodeSpec:
        """What the module reads and hands on."""
        assert self.spec.node is not None  # of every module of a graph
        return self.spec.node

    @property
    def hands_on_features(self) -> bool:
        """Whether it hands on features; else what its module returns."""
        return self.spec.chain

    @property
    def optional(self) -> bool:
        """Whether what the module hands on may come to have no gradient: not that of a loss alone.
        """
        return not self.node.loss or bool(self.node.outputs)

    @property
    def may_draw(self) -> bool:
        """Whether it may draw random numbers in training."""
        draws = self.node.draws
        return super().may_draw if draws is None else draws

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """Run one microbatch.

        Args:
            inputs: entries of the batch, of the module's first stage.
            received: messages of the modules that it reads, by name, or of the stage before.
            context: of the microbatch; with the scale of its loss.

        Raises:
            ModelError: what it reads or returns does not fit its description.
        """
        if not self.first:
            return super().run(None, received, context)
        arguments, self._rows = self._arguments(inputs or {}, received, context)
        with inputs_left_alone(self.node, arguments):
            return super().run(arguments, {}, context)

    def _from_stages(
        self, received: dict[str, Message]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Ports come from the modules that make them, too."""
        hidden, side, ports = super()._from_stages(received)
        for port in self.spec.ports:
            message = received.get(port.producers[0], Message((), {}))
            for name, tensor in zip(message.names, message.tensors, strict=True):
                if name == port.output:
                    ports[port.name] = tensor
        have = {shape_entry(name, port)[0] for name, port in ports.items()}
        return hidden, {n: entry for n, entry in side.items() if n not in have}, ports

    def _arguments(
        self, entries: dict[str, Any], received: Mapping[str, Message],
        context: MicrobatchContext,
    ) -> tuple[dict[str, Any], int]:
        there = [*entries.values(), *(t for m in received.values() for t in m.tensors)]
        device = next(t.device for t in there if isinstance(t, torch.Tensor))
        every = {name: _by_name(message, device) for name, message in received.items()}
        if not context.samples:
            sizes = [t.shape[0] for tensors in every.values() for t in tensors.values()]
            samples = next((len(value) for value in entries.values()), None) or sizes[0]
            own = Range(0, samples)
            return arguments_of(self.node, entries, every, every, own, context.seeds), samples
        (own,) = context.samples
        # What is read of every sample as well has more than the stage's own.
        both = {entry.producer for entry in self.node.inputs if entry.every}
        outputs = {
            name: {n: t[slice(*own)] for n, t in tensors.items()} if name in both else tensors
            for name, tensors in every.items()
        }
        return arguments_of(self.node, entries, outputs, every, own, context.seeds), own.size

    def _of_samples(self, inputs: dict[str, Any], context: MicrobatchContext) -> dict[str, Any]:
        """They are those of its samples: entries are dealt out before they are sent."""
        return inputs

    def _finished(
        self, inputs: dict[str, Any], output: Any, side: dict[str, torch.Tensor],
        context: MicrobatchContext,
    ) -> Message:  # fmt: skip
        """Floating-point tensors by name, the others beside them.

        Raises:
            ModelError: what it returned does not fit its description.
        """
        if self.spec.chain and self.node.postprocess is not None:
            output = self.node.postprocess(inputs, output)
        outputs = outputs_of(self.node, output, self._samples_of(side))
        loss = None
        if self.node.loss:
            losses = outputs.pop(ONLY)
            if self._items is not None:  # one without an item of its own worked for nothing
                losses = losses[: len(self._items.own(side))]
            loss = losses.sum() * context.scales.get(self.spec.name, 1.0)
            if self._exchange is not None and self._exchange.rank != CONTRIBUTOR:
                loss = loss * 0.0  # all compute it alike
        every = {name: self._once(tensor) for name, tensor in outputs.items()}
        if self._items is not None:
            every = {name: self._items.whole(tensor, side) for name, tensor in every.items()}
        named = {name: t for name, t in every.items() if t.is_floating_point()}
        rest = {name: t for name, t in every.items() if name not in named}
        return Message(tuple(named.values()), rest, tuple(named), loss)

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        """What processes that share tokens all have has its gradient on one of them."""
        if self._exchange is None or not tensor.is_floating_point():
            return tensor
        return contribute_once(tensor, self._exchange)

    def _samples_of(self, side: Mapping[str, torch.Tensor]) -> int | None:
        """How many samples the process has; None if it is not known."""
        if self._items is not None:
            return max(len(self._items.own(side)), 1)
        return self._rows if self.first else None


def _by_name(message: Message, device: torch.device) -> Tensors:
    """What a module handed on, in its order."""
    named = dict(zip(message.names, message.tensors, strict=True))
    if not message.side:
        return named
    named |= from_side(message.side, device)
    return dict(sorted(named.items(), key=_place))


def _place(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Entries of a tuple are named by their numbers."""
    name, _ = item
    return (int(name), "") if name.isdigit() else (0, name)
