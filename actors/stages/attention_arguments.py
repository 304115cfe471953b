"""Attention of a language model stage: masks, and the processes that split tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch

from raymm.actors.modules.blocks import block_list
from raymm.actors.modules.merge import MergePolicy, merged_layout
from raymm.actors.modules.message import ROUTED_TOKENS
from raymm.actors.modules.token_layout import MASKS, MaskPolicy, document_lengths, row_masks
from raymm.actors.sharding.context_method import attend_over
from raymm.actors.sharding.context_rows import (
    message_tokens,
    pad_layout,
    resize_tokens,
    shard_tokens,
    shared_rows,
    take_tokens,
    token_pairs,
)
from raymm.actors.sharding.visual_tokens import (
    LENGTH,
    SHOWN,
    cross_arguments,
    own_visual_tokens,
)
from raymm.actors.stages.item_shares import DRAWN_ROWS
from raymm.errors import ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.hf.cross_attention import share_cross_attention
from raymm.kernels.hf.document_rows import DOCUMENTS_ARGUMENT, mix_by_documents
from raymm.kernels.host_copies import on_host
from raymm.kernels.shared_draws import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LONGEST = "longest"
"""Side tensor: one more than the largest position of a microbatch."""


class Text(NamedTuple):
    """Tokens of a microbatch that this process computes at a stage.

    Attributes:
        device: device of the stage.
        side: tensors without gradient.
        ports: tensors with a gradient that layers of any stage read.
        hidden: (B, T, H) on stages after the first.
        relays: outputs of earlier blocks, received with the hidden state.
        embeds: (B, T, H) on the first stage.
        drawn: :data:`DRAWN_ROWS`; None if rows are not split.
        longest: :data:`LONGEST`; None if positions do not matter.
        tokens: the tokens within a row; None for all.
        arguments: attention arguments of the layers.
    """

    device: torch.device
    side: dict[str, Any]
    ports: dict[str, torch.Tensor]
    hidden: torch.Tensor | None = None
    relays: Sequence[torch.Tensor] = ()
    embeds: torch.Tensor | None = None
    drawn: torch.Tensor | None = None
    longest: torch.Tensor | None = None
    tokens: Cut | None = None
    arguments: Mapping[str, Any] = {}


@dataclass
class ModelMasks:
    """Attention with the masks that the model builds itself.

    Attributes:
        unread: side tensors that are not arguments of the model.
        blocks: dotted name of the list of blocks.
        mask: mask policy of the merged tokens.
        encoders: names of all encoders, whose kinds in the mask are counted from 1.
        mixers: classes of layers that mix tokens by other means than attention.
        cross: True if the stage has layers with cross attention.
    """

    unread: ClassVar = frozenset({
        "targets", "token_layout", "length", LENGTH, ROUTED_TOKENS, LONGEST, DRAWN_ROWS,
    })
    module: PreTrainedModel
    blocks: str | None
    mask: MaskPolicy | None
    encoders: tuple[str, ...]
    mixers: frozenset[str]
    cross: bool

    def split(self, exchange: Exchange) -> ModelMasks:
        """Return the attention for processes that split every row's tokens."""
        return MaskedAttention(**vars(self)).split(exchange)

    def kinds(self) -> dict[str, Any]:
        """Return the inputs of a merge policy that token layouts are built from."""
        return {}

    def masks(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a merge policy's result that masks are built from."""
        mask = merged.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            # Attention without padding mask is faster.
            mask = None if bool(on_host(mask).all()) else on_host(mask)
        return {"attention_mask": mask}

    def ports(
        self, ports: dict[str, torch.Tensor], side: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return this process's part of the ports; may add entries to ``side``."""
        return ports

    def prepare(self, text: Text) -> Text:
        """Return this process's tokens, with the attention arguments."""
        return text

    def model_arguments(self, arguments: dict[str, Any], merge: MergePolicy) -> dict[str, Any]:
        """Return the arguments of the model for those of a merge policy."""
        adapt = getattr(merge, "model_arguments", None)
        return arguments if adapt is None else adapt(arguments)

    def separates(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if positions do not mark packed rows for the model's own masks."""
        return "position_ids" not in arguments

    def resized(
        self, hidden: torch.Tensor, side: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Resize a message to a token count that depends on shapes only."""
        return hidden, side

    def detach(self) -> None:
        """Restore the module's original attention."""


@dataclass
class MaskedAttention(ModelMasks):
    """Attention with masks that are passed as arguments: ``mask``, by default the causal one.

    The module is modified until :meth:`detach`.
    """

    unread = ModelMasks.unread | {SHOWN}

    def __post_init__(self) -> None:
        module, mask = self.module, self.mask
        self._policy = MASKS["causal"] if mask is None else mask
        self._exchange: Exchange | None = None
        # Cost of a token outside attention; needed where processes may get unequal token counts.
        named = mask is None or mask in MASKS.values()
        self._pairs = 0 if named else token_pairs(module.config)
        hf_attention.register()
        self._before = cast(str, module.config._attn_implementation)
        module.set_attn_implementation(hf_attention.NAME)
        if self.cross:
            share_cross_attention(module)
        self._undo = None
        if self.mixers:
            assert self.blocks is not None  # mixers are only found inside blocks
            self._undo = mix_by_documents(block_list(module, self.blocks), self.mixers)

    def detach(self) -> None:
        self.module.set_attn_implementation(self._before)
        if self._undo is not None:
            self._undo()

    def split(self, exchange: Exchange) -> MaskedAttention:
        self._exchange = exchange
        return self

    def kinds(self) -> dict[str, Any]:
        return {"encoder_kinds": {name: n for n, name in enumerate(self.encoders, 1)}}

    def masks(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        return {"token_layout": merged_layout(merged, self.mask), "attention_mask": None}

    def ports(
        self, ports: dict[str, torch.Tensor], side: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return this process's part of cross-attention ports; ``side`` gets their full length.

        Raises:
            ModelError: the ports are not for cross attention.
        """
        if not ports:
            return ports
        if SHOWN not in side:
            raise ModelError(
                f"the merge policy returned {', '.join(ports)} as ports; with a mask, or cp above "
                "1, ports are accepted for cross attention (CrossAttend) only"
            )
        ports, side[LENGTH] = own_visual_tokens(ports, self._exchange)
        return ports

    def model_arguments(self, arguments: dict[str, Any], merge: MergePolicy) -> dict[str, Any]:
        return arguments

    def separates(self, arguments: Mapping[str, Any]) -> bool:
        return True

    def resized(
        self, hidden: torch.Tensor, side: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if self._exchange is None:
            return hidden, side
        length = int(on_host(side["length"]))
        tokens = message_tokens(length, self._exchange.size, self._pairs)
        return resize_tokens(hidden, side, tokens)

    def prepare(self, text: Text) -> Text:
        side, embeds, hidden, exchange = text.side, text.embeds, text.hidden, self._exchange
        if "token_layout" not in side:  # later tokens of a text in generation
            return text
        layout, policy = side["token_layout"], self._policy
        device, config = text.device, self.module.config
        reads_visual = SHOWN in side
        if exchange is None:
            arguments: dict[str, Any] = {hf_attention.MASK_ARGUMENT: row_masks(layout, policy)}
            if self.mixers:
                arguments[DOCUMENTS_ARGUMENT] = document_lengths(layout)
            if reads_visual:
                arguments |= cross_arguments(side, None, config, device)
            return text._replace(arguments=arguments)
        length = layout.shape[2]
        if embeds is not None:
            layout = pad_layout(layout, exchange.size)
        else:
            length = int(on_host(side["length"]))
        tokens = length
        masks = row_masks(layout, policy)
        group = shard_tokens(masks, length, exchange, self._pairs)
        if embeds is not None:
            unsplit = {k: v for k, v in side.items() if k in (SHOWN, LENGTH)}
            per_token = {k: v for k, v in side.items() if k not in ("token_layout", *unsplit)}
            positions = group.queries.positions(exchange.rank)
            side = take_tokens({**per_token, "inputs_embeds": embeds}, positions, length)
            embeds = side.pop("inputs_embeds")
            length = torch.tensor(length, device="cpu")
            side |= {**unsplit, "token_layout": layout, "length": length}
        elif hidden is not None:
            hidden, side = resize_tokens(hidden, side, group.queries.sizes[exchange.rank])
        arguments = {
            hf_attention.MASK_ARGUMENT: masks, hf_attention.ATTEND_ARGUMENT: attend_over(group)
        }
        if self.mixers:
            arguments[DOCUMENTS_ARGUMENT] = shared_rows(document_lengths(layout), None, group)
        if reads_visual:
            arguments |= cross_arguments(side, group, config, device)
        queries = group.queries
        return text._replace(
            side=side, embeds=embeds, hidden=hidden, arguments=arguments,
            tokens=Cut(queries.sizes[exchange.rank], tokens, queries.ranges[exchange.rank]),
        )
