"""FlexAttention of torch, with raymm's masks as its BlockMasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from raymm.kernels.mask.convert import to_block_mask
from raymm.kernels.mask.mask import AttentionMask, query_rows
from raymm.kernels.shared_draws import draws_suspended

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_CACHED_MASKS = 16
_BLOCK = 128  # rows and keys of FlexAttention's tiles


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[AttentionMask, ...],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`raymm.kernels.attention.attention` by FlexAttention: compiled on a GPU,
    uncompiled and without a backward pass on a CPU. Arguments and shapes are the same. Tokens are
    padded to :func:`padded_length`, so that few lengths are compiled."""
    rows, keys = query.shape[2], key.shape[2]
    sizes = padded_length(rows), padded_length(keys)
    query = F.pad(query, (0, 0, 0, sizes[0] - rows))
    key, value = (F.pad(t, (0, 0, 0, sizes[1] - keys)) for t in (key, value))
    with draws_suspended():  # it would run uncompiled under a dispatch mode
        out, lse = _function(query.device.type)(
            query, key, value,
            score_mod=None if softcap is None else _cap(softcap),
            block_mask=_block_mask(masks, sizes, query.device),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=True,
        )  # fmt: skip
    return out[:, :, :rows], lse[:, :, :rows].detach().float()


def padded_length(length: int) -> int:
    """Return a length rounded up to one of four classes per factor of two, a multiple of 128."""
    step = max(_BLOCK, 1 << max(length - 1, 0).bit_length() >> 3)
    return -(-length // step) * step


@cache
def _function(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as run

    # With fullgraph, exceeding the recompilation limit raises. Otherwise the call would run
    # uncompiled and materialize all scores.
    return run if device == "cpu" else torch.compile(run, fullgraph=True)


@lru_cache(_CACHED_MASKS)
def _block_mask(
    masks: tuple[AttentionMask, ...], sizes: tuple[int, int], device: torch.device
) -> BlockMask:
    """Return the block mask of padded sizes, cached for all layers of a model and both passes."""
    padded = {mask: _padded(mask, *sizes) for mask in masks}
    return to_block_mask([padded[mask] for mask in masks], len(masks), _BLOCK, device)


def _padded(mask: AttentionMask, n_queries: int, n_keys: int) -> AttentionMask:
    """Return a mask with more rows, which see only the first key, and more keys, which no row
    sees. A row without keys would have an infinite LSE."""
    rows, keys = mask.query_table, mask.key_table
    if n_queries > mask.n_queries:
        rows = np.concatenate([rows, query_rows([mask.n_queries], hi=1)])
    if n_keys > mask.n_keys:
        keys = np.concatenate([keys, [[mask.n_keys, 0]]])
    return AttentionMask(rows, keys, n_queries, n_keys)


@lru_cache(_CACHED_MASKS)
def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    """Return the softcap function, cached so that each cap is compiled once."""
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
