"""Context parallelism of a stage: distribution of a microbatch's tokens over processes.

The distribution is a function of the masks, so processes agree without messages. Sequences are
padded so that every process has equally many blocks. Under custom mask policies, counts may differ
by a few blocks (:mod:`raymm.scheduler.context_parallel.distribution`); messages have room for the
maximum.

Legend: ``B`` samples, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from raymm.actors.modules.message import ROUTED_TOKENS
from raymm.actors.modules.token_layout import PADDING
from raymm.kernels.collectives.gather import gather_for_each
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.document_rows import Lengths, SharedRows
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.mask.mask import AttentionMask

PAIR_RATE = 1 / 3
"""FLOP/s of attention kernels, forward and backward, relative to products with weights; estimated
from the compiled kernels' instructions and FlashAttention-2's figures on an H100."""
# Minimum number of blocks per process for load balancing, if there are enough tokens.
BLOCKS_PER_PROCESS = 8
MOST_BLOCK = 128  # rows of a kernel's tile


def block_size(length: int, processes: int) -> int:
    """Return the number of tokens that are distributed together: a kernel tile or a power of two
    below it.

    A tile is computed for all its rows if one of them sees its keys. Blocks that do not divide
    tiles would cost up to 0.14 of a step (``benchmarks.token_time``). ``length`` is T.
    """
    most = length // (BLOCKS_PER_PROCESS * processes)
    return 1 << (min(MOST_BLOCK, max(1, most)).bit_length() - 1)


def token_pairs(config: Any) -> int:
    """Return the query-key pairs that cost as much as all other work of one token in a layer.

    Missing values of ``config`` (transformers' names) are estimated.
    """
    config = config.get_text_config()

    def number(name: str, default: int) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) and value > 0 else default

    hidden = number("hidden_size", 1)
    heads = number("num_attention_heads", 1)
    head_dim = number("head_dim", max(1, hidden // heads))
    keys = number("num_key_value_heads", heads) * head_dim
    inner = number("intermediate_size", 4 * hidden)
    if (experts := number("num_experts_per_tok", 0)):
        inner = experts * number("moe_intermediate_size", inner)
    weights = hidden * (2 * heads * head_dim + 2 * keys + 3 * inner)
    # 2 products forward and 5 backward per pair; per weight 1 and 2.
    return max(1, round(PAIR_RATE * 6 * weights / (14 * heads * head_dim)))


def block_token_work(block: int, pairs: int) -> int:
    """Return a block's cost outside attention, in active key blocks; 0 for blocks smaller than a
    tile.

    Such a block costs as much as its tile, so uneven counts gain nothing.
    """
    return -(-pairs // block) if block == MOST_BLOCK else 0


def padded_length(length: int, processes: int) -> int:
    """Return the next length at which every process gets equally many blocks."""
    share = block_size(length, processes) * processes
    return -(-length // share) * share


def pad_layout(layout: torch.Tensor, processes: int) -> torch.Tensor:
    """Pad a token layout (3, B, T) to :func:`padded_length`."""
    missing = padded_length(layout.shape[2], processes) - layout.shape[2]
    padded = F.pad(layout, (0, missing))
    if missing:
        padded[2, :, -missing:] = PADDING
    return padded


def message_tokens(length: int, processes: int, pairs: int) -> int:
    """Return the token capacity of a process's messages to the next stage; see
    :func:`shard_tokens`."""
    from raymm.scheduler.context_parallel.distribution import most_blocks

    block, total = block_size(length, processes), padded_length(length, processes)
    if not block_token_work(block, pairs):
        return total // processes
    return block * most_blocks(total // block, processes)


def resize_tokens(
    hidden: torch.Tensor, side: dict[str, Any], tokens: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Pad or truncate hidden state (B, tokens, ...) and side tensors (..., tokens) to a token
    count."""
    added = tokens - hidden.shape[1]
    if not added:
        return hidden, side
    dims = hidden.dim()
    sized = {
        name: F.pad(side[name], (0, added), value=value)
        for name, value in (("targets", -100), ("position_ids", 0), (ROUTED_TOKENS, False))
        if name in side
    }
    return F.pad(hidden, (0, 0) * (dims - 2) + (0, added)), {**side, **sized}


def shard_tokens(
    masks: Sequence[AttentionMask], length: int, exchange: Exchange, pairs: int = 0
) -> ContextGroup:
    """Distribute a padded microbatch's tokens so that attention work and token counts are balanced.

    Args:
        masks: one per row.
        length: T before padding, which determines the block size.
        pairs: cost of a token outside attention (:func:`token_pairs`) if counts may differ; 0 for
            equal counts.
    """
    from raymm.scheduler.context_parallel.distribution import distribute
    from raymm.scheduler.context_parallel.workload import active_key_blocks

    block, total = block_size(length, exchange.size), masks[0].n_keys
    work, *further = (
        active_key_blocks(
            mask.query_table, mask.key_table, *mask.shape, query_block=block, key_block=block
        )
        for mask in masks
    )
    for mask_work in further:
        work = work + mask_work
    token_work = len(masks) * block_token_work(block, pairs)
    token_shards = distribute(
        work, exchange.size, n_tokens=total, block=block, token_work=token_work
    )
    layout = ContextLayout.of_blocks(token_shards.blocks, block, total)
    return ContextGroup(exchange, layout, layout)


def shared_rows(
    lengths: Lengths, real: torch.Tensor | None, group: ContextGroup
) -> SharedRows:
    """Return documents, by their lengths per row, whose tokens a group shares
    (:func:`shard_tokens`).

    ``real`` is (B, T) on the host, 0 for padding inside documents; None without padding.
    """
    layout, exchange = group.queries, group.exchange
    positions = [layout.positions(rank) for rank in range(exchange.size)]
    gather = partial(gather_for_each, sizes=layout.sizes, exchange=exchange)
    return SharedRows(lengths, positions, exchange.rank, gather, real)


def take_tokens(
    merged: dict[str, Any], positions: torch.Tensor, length: int
) -> dict[str, torch.Tensor]:
    """Select a process's tokens from the result of a merge policy.

    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), optionally ``position_ids`` (...,
            T) and ``routed_tokens`` (B, T).
        positions: the process's tokens, on the host; those from T on are padding.
        length: T.

    Raises:
        ValueError: ``merged`` has other entries.
    """
    accepted = {"inputs_embeds", "targets", "position_ids", ROUTED_TOKENS}
    if unknown := sorted(name for name, value in merged.items()
                         if name not in accepted and value is not None):  # fmt: skip
        raise ValueError(
            f"the merge policy returned {unknown}; accepted for a language model with context "
            f"parallelism: {sorted(accepted)}"
        )
    embeds, targets = merged["inputs_embeds"], merged["targets"]
    missing = int(positions.max()) + 1 - length if len(positions) else 0
    ids = merged.get("position_ids")
    if ids is None:
        ids = torch.arange(length, device=embeds.device).expand(embeds.shape[0], -1)
    missing = max(missing, 0)
    indices = to_device(positions, embeds.device)
    routed = {
        name: F.pad(on_host(merged[name]), (0, missing))[:, positions]
        for name in (ROUTED_TOKENS,) if name in merged
    }
    return {
        **routed,
        "inputs_embeds": F.pad(embeds, (0, 0, 0, missing))[:, indices],
        "targets": F.pad(on_host(targets), (0, missing), value=-100)[:, positions],
        "position_ids": F.pad(ids, (0, missing))[..., to_device(positions, ids.device)],
    }
