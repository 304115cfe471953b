"""Attention arguments of a language model stage: the mask and the context-parallel group."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from raymm.actors.modules.blocks import block_list
from raymm.actors.modules.token_layout import MaskPolicy, document_lengths, row_masks
from raymm.actors.sharding.context_method import attend_over
from raymm.actors.sharding.context_rows import (
    pad_layout,
    resize_tokens,
    shard_tokens,
    shared_rows,
    take_tokens,
)
from raymm.actors.sharding.visual_tokens import LENGTH, SHOWN, cross_arguments
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.hf.cross_attention import share_cross_attention
from raymm.kernels.hf.document_rows import DOCUMENTS_ARGUMENT, mix_by_documents
from raymm.kernels.host_copies import on_host
from raymm.kernels.shared_draws import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MaskedAttention:
    """Language model, or part of one, whose attention follows masks passed as arguments.

    Args:
        module: modified until :meth:`detach`.
        mixers: classes of layers that mix tokens by other means than attention.
    """

    def __init__(
        self, module: PreTrainedModel, blocks: str | None, mixers: Collection[str], cross: bool
    ) -> None:
        hf_attention.register()
        self._module, self._before = module, cast(str, module.config._attn_implementation)
        module.set_attn_implementation(hf_attention.NAME)
        if cross:
            share_cross_attention(module)
        self._undo = None
        if mixers:
            assert blocks is not None  # mixers are only found inside blocks
            self._undo = mix_by_documents(block_list(module, blocks), mixers)

    def detach(self) -> None:
        """Restore the module's original attention."""
        self._module.set_attn_implementation(self._before)
        if self._undo is not None:
            self._undo()


class Attended(NamedTuple):
    """Arguments with which a stage calls its part of a model, for the tokens of this process.

    ``tokens`` are these tokens within a row; None for all.
    """

    arguments: dict[str, Any]
    side: dict[str, Any]
    embeds: torch.Tensor | None
    hidden: torch.Tensor | None
    tokens: Cut | None = None


def attention_arguments(
    attended: Attended, policy: MaskPolicy, exchange: Exchange | None, pairs: int, config: Any,
    mixes: bool = False,
) -> Attended:
    """Return the mask arguments of the layers and, with context parallelism, this process's tokens.

    Args:
        attended: arguments of the stage without masks: ``embeds`` (B, T, H) on the first stage, or
            ``hidden`` (B, tokens of the process, H) on later stages.
        exchange: the processes that split the tokens; None without context parallelism.
        pairs: cost of a token outside attention, in query-key pairs.
        mixes: True to also pass document lengths, for layers that mix tokens by other means.
    """
    _, side, embeds, hidden, _ = attended
    layout = side["token_layout"]
    device = cast(torch.Tensor, embeds if hidden is None else hidden).device
    reads_visual = SHOWN in side
    if exchange is None:
        arguments: dict[str, Any] = {hf_attention.MASK_ARGUMENT: row_masks(layout, policy)}
        if mixes:
            arguments[DOCUMENTS_ARGUMENT] = document_lengths(layout)
        if reads_visual:
            arguments |= cross_arguments(side, None, config, device)
        return Attended(arguments, side, embeds, hidden)
    length = layout.shape[2]
    if embeds is not None:
        layout = pad_layout(layout, exchange.size)
    else:
        length = int(on_host(side["length"]))
    tokens = length
    masks = row_masks(layout, policy)
    group = shard_tokens(masks, length, exchange, pairs)
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
    if mixes:
        arguments[DOCUMENTS_ARGUMENT] = shared_rows(document_lengths(layout), None, group)
    if reads_visual:
        arguments |= cross_arguments(side, group, config, device)
    token_cut = Cut(group.queries.sizes[exchange.rank], tokens, group.queries.ranges[exchange.rank])
    return Attended(arguments, side, embeds, hidden, token_cut)
