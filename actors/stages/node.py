"""Stages of a graph module.

The first stage reads other modules and the batch. The last stage outputs the module's results by
name and computes its loss, if it has one.
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
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage, later_inputs
from raymm.actors.stages.stage import Call
from raymm.actors.stages.stage_inputs import from_side, from_stages
from raymm.kernels.collectives.gather import CONTRIBUTOR, contribute_once
from raymm.scheduler.graph.sample_ranges import Range


@dataclass(frozen=True)
class NodeStageSpec(EncoderSpec):
    """Description of a graph module; a rank builds its part from this data.

    ``chain`` is True for an encoder with projector and callbacks, which outputs features, and False
    if the module's raw output is used.
    """

    node: NodeSpec | None = None
    chain: bool = False


class NodeStage(EncoderStage):
    """Layers [lo, hi) of a module of a graph."""

    spec: NodeStageSpec
    _rows: int | None = None  # samples of the current microbatch

    @property
    def node(self) -> NodeSpec:
        """Inputs and outputs of the module."""
        assert self.spec.node is not None  # set for every module of a graph
        return self.spec.node

    @property
    def hands_on_features(self) -> bool:
        """True if the stage outputs token features, False for the raw module output."""
        return self.spec.chain

    @property
    def optional(self) -> bool:
        """True if the outputs may have no gradient; False for a module that only computes a loss.
        """
        return not self.node.loss or bool(self.node.outputs)

    @property
    def may_draw(self) -> bool:
        """True if the module may draw random numbers in training."""
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
            inputs: batch entries, on the module's first stage.
            received: messages of the modules that it reads, by name, or of the previous stage.

        Raises:
            ModelError: the module's inputs or outputs do not fit its description.
        """
        if not self.first:
            return super().run(None, received, context)
        arguments, self._rows = self._arguments(inputs or {}, received, context)
        with inputs_left_alone(self.node, arguments):
            return super().run(arguments, {}, context)

    def _resume(self, received: dict[str, Message]) -> Call:
        """Return the call of a stage after the first; ports may come from other modules."""
        hidden, side, ports = from_stages(received, self.spec.name)
        for port in self.spec.ports:
            message = received.get(port.producers[0], Message((), {}))
            for name, tensor in zip(message.names, message.tensors, strict=True):
                if name == port.output:
                    ports[port.name] = tensor
        have = {shape_entry(name, port)[0] for name, port in ports.items()}
        side = {name: entry for name, entry in side.items() if name not in have}
        return Call(hidden, later_inputs(side, hidden) | ports, side, ports)

    def _arguments(
        self, entries: dict[str, Any], received: Mapping[str, Message],
        context: MicrobatchContext,
    ) -> tuple[dict[str, Any], int]:
        values = [*entries.values(), *(t for m in received.values() for t in m.tensors)]
        device = next(t.device for t in values if isinstance(t, torch.Tensor))
        every = {name: _by_name(message, device) for name, message in received.items()}
        if not context.samples:
            sizes = [t.shape[0] for tensors in every.values() for t in tensors.values()]
            samples = next((len(value) for value in entries.values()), None) or sizes[0]
            rows = Range(0, samples)
            return arguments_of(self.node, entries, every, every, rows, context.seeds), samples
        (rows,) = context.samples
        # Producers that are also read with every() send all samples, not only those of this stage.
        producers = {entry.producer for entry in self.node.inputs if entry.every}
        outputs = {
            name: {n: t[slice(*rows)] for n, t in tensors.items()} if name in producers else tensors
            for name, tensors in every.items()
        }
        return arguments_of(self.node, entries, outputs, every, rows, context.seeds), rows.size

    def _of_samples(self, inputs: dict[str, Any], context: MicrobatchContext) -> dict[str, Any]:
        """Return the inputs unchanged: entries are split by samples before they are sent."""
        return inputs

    def _finished(self, output: Any, call: Call, context: MicrobatchContext) -> Message:
        """Return the module's floating-point outputs by name, the other outputs as side tensors.

        Raises:
            ModelError: the outputs do not fit the module's description.
        """
        side = call.side
        if self.spec.chain and self.node.postprocess is not None:
            output = self.node.postprocess(call.inputs, output)
        outputs = outputs_of(self.node, output, self._samples_of(side))
        loss = None
        if self.node.loss:
            losses = outputs.pop(ONLY)
            if self._items is not None:  # drops the extra item of a process without items
                losses = losses[: len(self._items.own(side))]
            loss = losses.sum() * context.scales.get(self.spec.name, 1.0)
            if self._exchange is not None and self._exchange.rank != CONTRIBUTOR:
                loss = loss * 0.0  # all processes compute the same loss
        every = {name: self._once(tensor) for name, tensor in outputs.items()}
        if self._items is not None:
            every = {name: self._items.whole(tensor, side) for name, tensor in every.items()}
        named = {name: t for name, t in every.items() if t.is_floating_point()}
        side_outputs = {name: t for name, t in every.items() if name not in named}
        return Message(tuple(named.values()), side_outputs, tuple(named), loss)

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep the gradient of an output on one process only, if processes split tokens."""
        if self._exchange is None or not tensor.is_floating_point():
            return tensor
        return contribute_once(tensor, self._exchange)

    def _samples_of(self, side: Mapping[str, torch.Tensor]) -> int | None:
        """Return the number of samples of the process; None if unknown."""
        if self._items is not None:
            return max(len(self._items.own(side)), 1)
        return self._rows if self.first else None


def _by_name(message: Message, device: torch.device) -> Tensors:
    """Return a module's outputs by name, in their original order."""
    named = dict(zip(message.names, message.tensors, strict=True))
    if not message.side:
        return named
    named |= from_side(message.side, device)
    return dict(sorted(named.items(), key=_place))


def _place(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Sort key: entries of a tuple are named by their numbers."""
    name, _ = item
    return (int(name), "") if name.isdigit() else (0, name)
