"""Context parallelism of a stage: which tokens of a microbatch each process has.

Processes agree without a message: all know the microbatch's masks, and the distribution is a
function of them. How *many* tokens each has depends on shapes only, as receives need, so
sequences are padded until every process has as many blocks.

Legend: ``B`` samples, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from raymm.actors.modules.token_layout import PADDING
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.mask.mask import AttentionMask

# Blocks that each process gets at least, where there are tokens enough, to balance with.
BLOCKS_PER_PROCESS = 8
MOST_BLOCK = 128


def block_size(length: int, processes: int) -> int:
    """Tokens that are split together."""
    return max(1, min(MOST_BLOCK, length // (BLOCKS_PER_PROCESS * processes)))


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


def shard_tokens(
    masks: Sequence[AttentionMask], length: int, exchange: Exchange
) -> ContextGroup:
    """Deal a padded microbatch's tokens out so that attention work and token count balance.

    Args:
        masks: of every row.
        length: T before padding, which says how large blocks are.
        exchange: the processes that get the tokens.
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
    token_shards = distribute(work, exchange.size, n_tokens=total, block=block)
    layout = ContextLayout.of_blocks(token_shards.blocks, block, total)
    return ContextGroup(exchange, layout, layout)


def take_tokens(
    merged: dict[str, Any], positions: torch.Tensor, length: int
) -> dict[str, torch.Tensor]:
    """A process's share of what a merge policy returned: its tokens' embeddings, targets and
    position ids.

    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), perhaps ``position_ids``
            (..., T).
        positions: the process's tokens, on the host; those from T on are padding.
        length: T.

    Raises:
        ValueError: if there is anything else for the model that belongs to tokens.
    """
    accepted = {"inputs_embeds", "targets", "position_ids"}
    if unknown := sorted(name for name, value in merged.items()
                         if name not in accepted and value is not None):  # fmt: skip
        raise ValueError(
            f"the merge policy returned {unknown}; with context parallelism a language model "
            f"gets {sorted(accepted)} and nothing else"
        )
    embeds, targets = merged["inputs_embeds"], merged["targets"]
    missing = int(positions.max()) + 1 - length if len(positions) else 0
    ids = merged.get("position_ids")
    if ids is None:
        ids = torch.arange(length, device=embeds.device).expand(embeds.shape[0], -1)
    missing = max(missing, 0)
    own = to_device(positions, embeds.device)
    return {
        "inputs_embeds": F.pad(embeds, (0, 0, 0, missing))[:, own],
        "targets": F.pad(on_host(targets), (0, missing), value=-100)[:, positions],
        "position_ids": F.pad(ids, (0, missing))[..., to_device(positions, ids.device)],
    }
