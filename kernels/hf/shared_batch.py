"""Arguments for layers when a sample's text tokens, and its visual tokens for cross attention, are
split over processes.

They pass through the model's forward as keyword arguments, so microbatches with different masks can
be in flight at once, and a layer that is recomputed in the backward pass gets the same arguments.

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
"""``choose(group, masks, query, key, recompute=) -> method``; must agree on all processes.
``raymm.actors.sharding.visual_tokens.LeastBytes`` is one."""


def chosen(
    method: str | MethodChooser, group: ContextGroup, masks: Sequence[AttentionMask],
    query: torch.Tensor, key: torch.Tensor, recompute: bool = False,
) -> str:  # fmt: skip
    """Return ``method`` if it is a name, else the name that it chooses for query (B, Hq, Tq, D) and
    key (B, Hk, Tk, D). ``recompute`` is True if keys and values are recomputed in backward."""
    if isinstance(method, str):
        return method
    return method(group, tuple(masks), query, key, recompute=recompute)


@dataclass(frozen=True)
class CrossAttention:
    """Argument of cross-attention layers.

    Attributes:
        group: its queries are text tokens, its keys visual tokens.
        masks: (T, V), one per sequence or one for all.
        method: one of ``context_parallel.METHODS``, or a function that chooses one.
        recompute: save the visual tokens, which all layers share, instead of each layer's queries,
            keys and values, and recompute these in the backward pass.
    """

    group: ContextGroup
    masks: tuple[AttentionMask, ...]
    method: str | MethodChooser = "rotate"
    recompute: bool = False
