"""FlexAttention of torch, with raymm's masks as its BlockMasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from raymm.kernels.mask.convert import to_block_mask
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.shared_draws import draws_suspended

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_CACHED_MASKS = 16


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
    uncompiled and without a backward pass on a CPU. Arguments and shapes are the same."""
    with draws_suspended():  # it would run uncompiled under a dispatch mode
        out, lse = _function(query.device.type)(
            query, key, value,
            score_mod=None if softcap is None else _cap(softcap),
            block_mask=_block_mask(masks, query.device),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=True,
        )  # fmt: skip
    return out, lse.detach().float()


@cache
def _function(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as run

    # With fullgraph, exceeding the recompilation limit raises. Otherwise the call would run
    # uncompiled and materialize all scores.
    return run if device == "cpu" else torch.compile(run, fullgraph=True)


@lru_cache(_CACHED_MASKS)
def _block_mask(masks: tuple[AttentionMask, ...], device: torch.device) -> BlockMask:
    """Return the block mask, cached for all layers of a model and both passes."""
    return to_block_mask(masks, len(masks), device=device)


@lru_cache(_CACHED_MASKS)
def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    """Return the softcap function, cached so that each cap is compiled once."""
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
