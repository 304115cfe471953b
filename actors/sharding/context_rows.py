"""Context parallelism of a stage: which tokens of a microbatch each process has.

Processes agree without a message: all know the microbatch's masks, and the distribution is a
function of them. Sequences are padded until every process has as many blocks. Under a mask policy
that is not one of raymm's own, processes may have a block or two more or fewer than that
(:mod:`raymm.scheduler.context_parallel.uneven_counts`; under raymm's own that gains nothing). What
they send each other has room for the most that a process may have, as receives need shapes that
depend on shapes only.

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
from raymm.kernels.collectives.gather_tokens import gather_for_each
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.document_rows import Lengths, SharedRows
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.mask.mask import AttentionMask

PAIR_RATE = 1 / 3
"""FLOP/s of attention's kernels, forward and backward, over those of products with weights; roughly
what the compiled kernels' instructions and FlashAttention-2's figures come to on an H100."""
# Blocks that each process gets at least, where there are tokens enough, to balance with.
BLOCKS_PER_PROCESS = 8
MOST_BLOCK = 128  # rows of a kernel's tile


def block_size(length: int, processes: int) -> int:
    """Tokens that are split together: as many as the rows of a kernel's tile, or a power of two of
    them where that makes too few blocks.

    A tile is computed for all its rows if one of them sees its keys, so work is shared out best in
    whole tiles, and blocks that fill tiles up come next. Of odd sizes tiles would cross blocks that
    see different keys (``benchmarks.token_time``: up to 0.14 of a step).

    Args:
        length: T, tokens of a row.
        processes: that share them.
    """
    most = length // (BLOCKS_PER_PROCESS * processes)
    return 1 << (min(MOST_BLOCK, max(1, most)).bit_length() - 1)


def token_pairs(config: Any) -> int:
    """How many pairs of a query and a key take a layer's attention as long as all else takes it
    for one token; forward and backward. The same for all of a model's stages, as a configuration
    is.

    Args:
        config: of the model, by transformers' names. Of what it does not say, what is usual.
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
    """What a block costs beside attention, in its active key blocks; 0 for blocks that do not fill
    a tile: of those each would be as much work as the tile that it comes to lie in, so that
    counts which differ gain nothing.

    Args:
        block: tokens of a block.
        pairs: that a token costs (:func:`token_pairs`); 0 for what is not known.
    """
    return -(-pairs // block) if block == MOST_BLOCK else 0


def padded_length(length: int, processes: int) -> int:
    """The next length at which every process gets as many blocks."""
    share = block_size(length, processes) * processes
    return -(-length // share) * share


def pad_layout(layout: torch.Tensor, processes: int) -> torch.Tensor:
    """A token layout (3, B, T) with padding up to :func:`padded_length`."""
    missing = padded_length(layout.shape[2], processes) - layout.shape[2]
    padded = F.pad(layout, (0, missing))
    if missing:
        padded[2, :, -missing:] = PADDING
    return padded


def message_tokens(length: int, processes: int, pairs: int) -> int:
    """Tokens that a process's messages to the next stage have room for.

    Args:
        length: T before padding.
        processes: that share the tokens.
        pairs: as of :func:`shard_tokens`.
    """
    from raymm.scheduler.context_parallel.uneven_counts import most_blocks

    block, total = block_size(length, processes), padded_length(length, processes)
    if not block_token_work(block, pairs):
        return total // processes
    return block * most_blocks(total // block, processes)


def resize_tokens(
    hidden: torch.Tensor, side: dict[str, Any], tokens: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A process's tokens with room for others after them, or without it.

    Args:
        hidden: (B, tokens, ...).
        side: what goes with it; ``targets``, ``position_ids`` and, if there, ``routed_tokens`` are
            (..., tokens).
        tokens: how many there are to be.
    """
    more = tokens - hidden.shape[1]
    if not more:
        return hidden, side
    dims = hidden.dim()
    sized = {
        name: F.pad(side[name], (0, more), value=value)
        for name, value in (("targets", -100), ("position_ids", 0), (ROUTED_TOKENS, False))
        if name in side
    }
    return F.pad(hidden, (0, 0) * (dims - 2) + (0, more)), {**side, **sized}


def shard_tokens(
    masks: Sequence[AttentionMask], length: int, exchange: Exchange, pairs: int = 0
) -> ContextGroup:
    """Deal a padded microbatch's tokens out so that attention work and token count balance.

    Args:
        masks: of every row.
        length: T before padding, which says how large blocks are.
        exchange: the processes that get the tokens.
        pairs: what a token costs beside attention (:func:`token_pairs`), where counts may
            differ; 0 where all are to have equally many.
    """
    from raymm.scheduler.context_parallel.distribution import distribute
    from raymm.scheduler.context_parallel.workload import active_key_blocks

    block, total = block_size(length, exchange.size), masks[0].n_keys
    work, *others = (
        active_key_blocks(
            mask.query_table, mask.key_table, *mask.shape, query_block=block, key_block=block
        )
        for mask in masks
    )
    for other in others:
        work = work + other
    token_work = len(masks) * block_token_work(block, pairs)
    token_shards = distribute(
        work, exchange.size, n_tokens=total, block=block, token_work=token_work
    )
    layout = ContextLayout.of_blocks(token_shards.blocks, block, total)
    return ContextGroup(exchange, layout, layout)


def shared_rows(
    lengths: Lengths, real: torch.Tensor | None, group: ContextGroup
) -> SharedRows:
    """Documents of rows whose tokens a group shares.

    Args:
        lengths: per row, of its documents.
        real: (B, T) on the host, 0 for padding that is in documents; None if there is none.
        group: of :func:`shard_tokens`.
    """
    layout, exchange = group.queries, group.exchange
    positions = [layout.positions(rank) for rank in range(exchange.size)]
    gather = partial(gather_for_each, sizes=layout.sizes, exchange=exchange)
    return SharedRows(lengths, positions, exchange.rank, gather, real)


def take_tokens(
    merged: dict[str, Any], positions: torch.Tensor, length: int
) -> dict[str, torch.Tensor]:
    """A process's share of what a merge policy returned: its tokens' embeddings, targets and
    position ids.

    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), perhaps ``position_ids``
            (..., T) and ``routed_tokens`` (B, T).
        positions: the process's tokens, on the host; those from T on are padding.
        length: T.

    Raises:
        ValueError: if there is anything else for the model that belongs to tokens.
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
    own = to_device(positions, embeds.device)
    routed = {
        name: F.pad(on_host(merged[name]), (0, missing))[:, positions]
        for name in (ROUTED_TOKENS,) if name in merged
    }
    return {
        **routed,
        "inputs_embeds": F.pad(embeds, (0, 0, 0, missing))[:, own],
        "targets": F.pad(on_host(targets), (0, missing), value=-100)[:, positions],
        "position_ids": F.pad(ids, (0, missing))[..., to_device(positions, ids.device)],
    }
