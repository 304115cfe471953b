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
    """:func:`raymm.kernels.attention.attention` by FlexAttention: compiled on a GPU; a CPU runs it
    as it is, and has no backward pass of it.

    Args:
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        value: (B, Hk, Tk, Dv).
        masks: one per sequence.
        scale: default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
    """
    with draws_suspended():  # dispatch modes would run it uncompiled
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

    # fullgraph: lengths of which it has compiled too many raise, instead of running uncompiled,
    # with a matrix of all scores.
    return run if device == "cpu" else torch.compile(run, fullgraph=True)


@lru_cache(_CACHED_MASKS)
def _block_mask(masks: tuple[AttentionMask, ...], device: torch.device) -> BlockMask:
    """All layers of a model, and both passes, share it."""
    return to_block_mask(masks, len(masks), device=device)


@lru_cache(_CACHED_MASKS)
def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    """The same function for the same cap, which is compiled once."""
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
