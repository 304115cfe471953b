"""What a language model's attention is told: which tokens see which, and who has them."""

from __future__ import annotations

from typing import Any, cast

import torch

from raymm.actors.modules.token_layout import MaskPolicy, row_masks
from raymm.actors.sharding.context_method import attend_over
from raymm.actors.sharding.context_rows import (
    pad_layout,
    resize_tokens,
    shard_tokens,
    take_tokens,
)
from raymm.actors.sharding.visual_tokens import LENGTH, SHOWN, cross_arguments
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.host_copies import on_host


def attention_arguments(
    side: dict[str, Any], embeds: torch.Tensor | None, hidden: torch.Tensor | None,
    policy: MaskPolicy, exchange: Exchange | None, pairs: int, config: Any,
) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor | None, torch.Tensor | None]:
    """What the layers are told of the mask; and, where tokens are shared, what is left of
    the merged microbatch, or of what came, for this process.

    Args:
        side: what was merged, or came, with its token layout.
        embeds: of the first stage, (B, T, H).
        hidden: of others, (B, T of the process, H).
        policy: of the mask.
        exchange: the processes that share tokens; None for one alone.
        pairs: what a token costs beside attention, in pairs of a query and a key.
        config: of the model.

    Returns:
        Keyword arguments of the model; side, embeds and hidden of the process.
    """
    layout = side["token_layout"]
    device = cast(torch.Tensor, embeds if hidden is None else hidden).device
    reads_visual = SHOWN in side
    if exchange is None:
        arguments: dict[str, Any] = {hf_attention.MASK_ARGUMENT: row_masks(layout, policy)}
        if reads_visual:
            arguments |= cross_arguments(side, None, config, device)
        return arguments, side, embeds, hidden
    length = layout.shape[2]
    if embeds is not None:
        layout = pad_layout(layout, exchange.size)
    else:
        length = int(on_host(side["length"]))
    masks = row_masks(layout, policy)
    group = shard_tokens(masks, length, exchange, pairs)
    if embeds is not None:
        whole = {k: v for k, v in side.items() if k in (SHOWN, LENGTH)}
        rest = {k: v for k, v in side.items() if k not in ("token_layout", *whole)}
        positions = group.queries.positions(exchange.rank)
        side = take_tokens({**rest, "inputs_embeds": embeds}, positions, length)
        embeds = side.pop("inputs_embeds")
        length = torch.tensor(length, device="cpu")
        side |= {**whole, "token_layout": layout, "length": length}
    elif hidden is not None:
        hidden, side = resize_tokens(hidden, side, group.queries.sizes[exchange.rank])
    arguments = {
        hf_attention.MASK_ARGUMENT: masks, hf_attention.ATTEND_ARGUMENT: attend_over(group)
    }
    if reads_visual:
        arguments |= cross_arguments(side, group, config, device)
    return arguments, side, embeds, hidden
