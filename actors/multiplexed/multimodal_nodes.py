"""Encoders and the language model of a multimodal model as nodes of a multiplexed program.

Samples are rows of the text. An encoder works on the items of its samples, of which a sample may
have any number or none; its outputs have a row per item. The language model puts the features of
its own samples' items into their text, and hands on the sum of their tokens' losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.message import Message, StageModule
from raymm.actors.modules.node import ONLY, Input, NodeInputs, NodeSpec, OutputError, Tensors
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.scheduler.graph.sample_ranges import Range

_TEXT = ("input_ids", "labels", "attention_mask")


def encoder_node(spec: EncoderSpec) -> NodeSpec:
    """The node of a whole encoder with its projector."""
    return EncoderNode(spec.name, partial(EncoderStage.build, spec, 0, spec.num_layers))


def language_node(spec: LanguageSpec) -> NodeSpec:
    """The node of a whole language model, which is the loss."""
    return LanguageNode(
        spec.name, partial(LanguageStage.build, spec, 0, spec.num_layers),
        inputs=tuple(Input(name, name) for name in spec.encoders), loss=True,
    )


@dataclass(frozen=True)
class EncoderNode(NodeSpec):
    """An encoder: hands on features (items, tokens, width)."""

    def own_entries(self, entries: Mapping[str, Any], rows: Range) -> Mapping[str, Any]:
        """Its items of all that the microbatch has."""
        return {
            name: value[rows.lo : rows.hi]
            for name, value in entries.items() if name != "sample_index"
        }

    def run(self, module: nn.Module, inputs: NodeInputs) -> Tensors:
        """
        Raises:
            OutputError: it returns features of another number of items.
        """
        message = cast(StageModule, module).run(dict(inputs.entries), {}, inputs.context)
        features = message.tensors[0]
        if features.shape[0] != inputs.rows.size:
            raise OutputError(
                f"{self.name!r} returns features of shape {tuple(features.shape)} for "
                f"{inputs.rows.size} items; accepted: (items, tokens, width)"
            )
        return {ONLY: features}


@dataclass(frozen=True)
class LanguageNode(NodeSpec):
    """A language model: hands on its part of the step's loss (a scalar)."""

    def own_entries(self, entries: Mapping[str, Any], rows: Range) -> Mapping[str, Any]:
        """Its rows of the text."""
        return {name: entries[name][rows.lo : rows.hi] for name in _TEXT}

    def run(self, module: nn.Module, inputs: NodeInputs) -> Tensors:
        """Merge the features of its samples' items, and run."""
        received, index = {}, {}
        for entry in self.inputs:
            if entry.producer in inputs.inputs:
                received[entry.producer] = Message((inputs.inputs[entry.producer][ONLY],), {})
                counts = torch.tensor(inputs.counts[entry.producer])
                rows = torch.arange(inputs.own.size).repeat_interleave(counts)
                index[entry.producer] = rows.to(inputs.entries["input_ids"].device)
        text = {**inputs.entries, "sample_index": index}
        message = cast(StageModule, module).run(text, received, inputs.context)
        assert message.loss is not None  # of a whole language model
        return {ONLY: message.loss}
