"""What the layers of a model are told where processes share a sample's text tokens, and its
visual tokens for cross attention.

It travels through the model's forward as keyword arguments, so microbatches with different
masks may be under way at once, and a layer that runs again in the backward pass is told the same.

Legend: ``B`` sequences, ``T`` text tokens, ``V`` visual tokens, ``n`` processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.mask.mask import AttentionMask

CROSS_ARGUMENT = "raymm_cross"
"""Keyword argument of a model's forward: a :class:`CrossAttention`."""

MethodChooser = Callable[..., str]
"""``choose(group, masks, query, key, recompute=) -> method``; must say the same on every process.
``raymm.actors.sharding.least_bytes.LeastBytes`` is one."""


def chosen(
    method: str | MethodChooser, group: ContextGroup, masks: Sequence[AttentionMask],
    query: torch.Tensor, key: torch.Tensor, recompute: bool = False,
) -> str:  # fmt: skip
    """A method's name, of itself or of what chooses it for these tensors.

    Args:
        method: a name, or what chooses one.
        group: who has what.
        masks: one per sequence of the batch.
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        recompute: whether keys and values are made again in backward.
    """
    if isinstance(method, str):
        return method
    return method(group, tuple(masks), query, key, recompute=recompute)


@dataclass(frozen=True)
class CrossAttention:
    """What cross-attention layers are told.

    Attributes:
        group: text tokens are its queries, visual tokens its keys.
        masks: (T, V), one per sequence or one for all.
        method: one of ``context_parallel.METHODS``, or what chooses one.
        recompute: keep the visual tokens, which all layers share, instead of every layer's
            queries, keys and values, and make these again in the backward pass.
    """

    group: ContextGroup
    masks: tuple[AttentionMask, ...]
    method: str | MethodChooser = "rotate"
    recompute: bool = False
