"""Stages of a Hugging Face VLM's language model.

They run the model's own forward, in which the calls of towers return the features received from the
tower ranks. Every stage gets the batch unchanged, except for inputs of towers: of these, only
integers (grids, sizes) and the shapes of floats are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.modules.message import Decode, Message, MicrobatchContext
from raymm.actors.sharding.context_method import attend_over
from raymm.actors.sharding.context_rows import shared_rows
from raymm.actors.sharding.vlm.text_entry import Sharing, TextEntry
from raymm.actors.sharding.vlm.token_share import TokenShare, packed_tokens, zigzag
from raymm.actors.stages.attention_arguments import Text
from raymm.actors.stages.features import Form, ReceivedFeatures
from raymm.actors.stages.language import LanguageSpec, LanguageStage, TextCall
from raymm.actors.stages.stage_inputs import from_side, to_side
from raymm.actors.stages.texts.decoding import PreparedInputs
from raymm.actors.weights.model_part import Call
from raymm.errors import ForwardLeft
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.host_copies import on_host
from raymm.kernels.shared_draws import Cut, Grid

_TARGETS, _FEATURES, _REAL = "targets", "features/", "attention_mask"


@dataclass(frozen=True)
class TowerPort:
    """Features of structure ``form`` that ``call`` returns and the language model receives."""

    name: str
    call: Call
    form: Form


@dataclass(frozen=True)
class VlmLanguageSpec(LanguageSpec):
    """Description of a Hugging Face VLM without towers; with ``relays``, later stages read
    features."""

    towers: tuple[TowerPort, ...] = ()
    relays: bool = False


def language_inputs(
    text: dict[str, Any], towers: dict[str, dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return the first stage's inputs for a microbatch.

    Args:
        text: inputs that belong to no tower: ``input_ids``, ``labels`` (B, T) int64, masks.
        towers: by tower name, the model arguments that the tower reads.
    """
    inputs = to_side(text, (), "the language model")
    for name, arguments in towers.items():
        inputs |= to_side({k: v for k, v in arguments.items() if k != "sample_index"}, (), name)
    return inputs


class VlmLanguageStage(LanguageStage):
    """Blocks [lo, hi) of a Hugging Face VLM's language model; the last stage returns the loss."""

    spec: VlmLanguageSpec

    def __init__(self, spec: VlmLanguageSpec, lo: int, hi: int, module: nn.Module) -> None:
        # This class packs rows itself, because it uses the model's own masks.
        super().__init__(replace(spec, packing=False), lo, hi, module)
        self.spec = spec
        self._features = {port.name: ReceivedFeatures(port.name) for port in spec.towers}
        for port in spec.towers:
            port.call.replace(module, self._features[port.name])
        self._relayed_blocks = len(spec.cut.relayed_before(lo)) if spec.cut else 0
        self._entry: TextEntry | None = None
        self._exchange: Exchange | None = None
        self._texts = PreparedInputs(module)
        if spec.packing:
            self._use_own_masks()

    def share_samples(self, exchange: Exchange) -> None:
        """Split samples over a group; up to its text model, the forward runs on all rows."""
        super().share_samples(exchange)
        self._use_entry()

    def share_tokens(self, exchange: Exchange) -> None:
        """Split tokens over a group; masks, and the forward up to the text model, cover all tokens.
        """
        self._exchange, self.is_shared = exchange, True
        self._objective.share_tokens(exchange)
        self._use_own_masks()

    def _use_own_masks(self) -> None:
        """Use raymm's attention with the masks that the model builds."""
        hf_attention.register()
        self.module.set_attn_implementation(hf_attention.NAME)
        self._use_entry()

    def _use_entry(self) -> None:
        if self._entry is None:
            assert self._forward.blocks is not None  # the probe has found blocks
            self._entry = TextEntry(
                self.module, self._forward.blocks, self.spec.mixers, self._forward.rotary
            )

    def _share(self, shape: tuple[int, int], real: torch.Tensor | None) -> Sharing:
        """Return this process's tokens of (B, T) and how layers reach the other tokens. ``real`` is
        0 for padding."""
        rows = attend = columns = together = ranges = None
        if self._rows.is_split:
            rows = self._rows.own(shape[0]) or range(1)
        documents = packed_tokens(shape, real, rows) if self.spec.packing else None
        if self._exchange is not None:
            length = shape[1] if documents is None else len(documents)
            layout = zigzag(length, self._exchange.size)
            columns = layout.positions(self._exchange.rank)
            ranges = layout.ranges[self._exchange.rank]
            group = ContextGroup(self._exchange, layout, layout)
            attend, together = attend_over(group), partial(shared_rows, group=group)
        if documents is not None:
            tokens = documents if columns is None else documents[columns]
            share = TokenShare(shape, packed=tokens, documents=documents)
            first, count = 0, len(documents)
            if rows is not None:
                every = packed_tokens(shape, real)
                first, count = int((every < rows.start * shape[1]).sum()), len(every)
            ranges = ranges or ((0, len(documents)),)
            packed = Cut(len(tokens), count, tuple((first + lo, first + hi) for lo, hi in ranges))
            return Sharing(share, real, attend, together, Grid(Cut.uncut(1), packed))
        if rows is columns is None:
            return Sharing(None, real, attend, together)
        grid = Grid(
            Cut.uncut(shape[0]) if rows is None
            else Cut.from_range(rows.start, rows.stop, shape[0]),
            Cut.uncut(shape[1]) if columns is None or ranges is None
            else Cut(len(columns), shape[1], ranges),
        )
        return Sharing(TokenShare(shape, rows, columns), real, attend, together, grid)

    def _own(
        self, values: torch.Tensor, share: TokenShare | None, none: int | bool
    ) -> torch.Tensor:
        """Select this process's tokens from (B, T); use ``none`` if the process has no rows of its
        own."""
        if share is None:
            return values
        local_values = share.of_tokens(values)
        if not self._rows.own(len(values)):
            local_values = torch.full_like(local_values, none)
        return local_values

    def _begin(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> Text:
        """Return the side tensors for all stages and the towers' features."""
        side = {n: value for n, value in inputs.items() if n not in ("labels", "sample_index")}
        labels = on_host(inputs["labels"])
        side[_TARGETS] = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        features: list[torch.Tensor] = []
        for port in self.spec.towers:
            if (message := received.get(port.name)) is None:
                continue
            shapes = port.form.shapes(message.tensors)
            side |= {
                f"{_FEATURES}{port.name}/{name}": value
                for name, value in {**message.side, **shapes}.items()
            }
            features += message.tensors
        return Text(next(self.module.parameters()).device, side, _numbered(features))

    def _resume(self, received: dict[str, Message]) -> Text:
        (message,) = received.values()
        (hidden, *tensors), side = message.tensors, dict(message.side)
        relays, features = tensors[: self._relayed_blocks], tensors[self._relayed_blocks :]
        return Text(hidden.device, side, _numbered(features), hidden, relays)

    def _call(
        self, text: Text, reference: torch.Tensor | None, context: MicrobatchContext
    ) -> TextCall:
        side, device = text.side, text.device
        self._show(side, text.ports.values(), device)
        targets = on_host(side[_TARGETS])
        real = on_host(side[_REAL]) if _REAL in side else None
        B, T = targets.shape
        sharing = self._share((B, T), real)
        arguments = {n: v for n, v in side.items() if n != _TARGETS and _FEATURES not in n}
        local_targets = self._own(targets, sharing.tokens, IGNORE_INDEX)
        return TextCall(
            hidden=text.hidden, inputs=from_side(arguments, device), side=side,
            ports=text.ports if self.spec.relays else {}, relays=text.relays,
            length=T,
            counted=self._own(self._routing.real(real, (B, T)), sharing.tokens, False),
            around=self._around_text(sharing),
            labelled=self._objective.labels(local_targets, device, context), reference=reference,
        )

    @contextmanager
    def _around_text(self, sharing: Sharing) -> Iterator[None]:
        """Context manager of a forward: this process's tokens, and the received features."""
        try:
            with self._entry.sharing(sharing) if self._entry else nullcontext():
                yield
        finally:
            for port in self._features.values():
                port.receive(None)

    def _with_caches(
        self, inputs: dict[str, Any], decode: Decode | None, caching: dict[str, Any]
    ) -> dict[str, Any]:
        if decode is None:
            return inputs | caching
        return self._texts.arguments(decode, inputs, caching)

    def pass_on(self, left: ForwardLeft, call: TextCall) -> Message:
        return Message((left.value, *left.relays, *call.ports.values()), call.side)

    def _show(
        self, side: dict[str, torch.Tensor], features: Iterable[torch.Tensor], device: torch.device
    ) -> None:
        """Let the towers' calls return the received features, or zeros where they are not read."""
        came = iter(features)
        for port in self.spec.towers:
            start = f"{_FEATURES}{port.name}/"
            entries = {n.removeprefix(start): v for n, v in side.items() if n.startswith(start)}
            if not entries:
                continue
            shapes = {name: v for name, v in entries.items() if name.startswith("shape/")}
            tensors = list(islice(came, len(shapes)))
            if not tensors:
                tensors = [zeros.clone() for zeros in from_side(shapes, device).values()]
            self._features[port.name].receive(port.form.unpacked(tensors, entries))


def _numbered(features: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(features)}
