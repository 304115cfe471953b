"""The attention method that sends the fewest bytes, chosen when a layer attends: what
``kernels.shared_batch.SharedBatch`` takes for a method, as the choice is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from raymm.kernels.context_call import ContextGroup
from raymm.kernels.context_layout import ContextLayout, needed_keys
from raymm.kernels.mask import AttentionMask
from raymm.scheduler.attention_traffic import (
    METHODS,
    AttentionShape,
    MethodChoice,
    choose_method,
)

_CACHED_CHOICES = 256


@dataclass(frozen=True)
class LeastBytes:
    """``method=LeastBytes()``: keys and values or queries move, whichever is less.

    Layouts and masks are the same on every process, so all choose alike.

    Attributes:
        backward: whether the bytes of a backward pass count.
        methods: which may be chosen.
    """

    backward: bool = True
    methods: tuple[str, ...] = METHODS

    def __call__(
        self,
        group: ContextGroup,
        masks: tuple[AttentionMask, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        recompute: bool = False,
    ) -> str:
        """The method for one call.

        Args:
            query: (B, Hq, Tq, D), of which only shape and dtype are read.
            key: (B, Hk, Tk, D).
            recompute: whether queries, keys and values are made again in the backward pass,
                which rules ulysses out.

        Raises:
            AttentionTrafficError: none of the methods can be used.
        """
        element = query.element_size()
        if torch.is_autocast_enabled(query.device.type):
            element = torch.get_autocast_dtype(query.device.type).itemsize
        heads = query.shape[1], key.shape[1], query.shape[3]
        methods = tuple(m for m in self.methods if not (recompute and m == "ulysses"))
        return traffic(
            group.queries, group.keys, masks, heads, element, query.shape[0], self.backward, methods
        ).method


@lru_cache(maxsize=_CACHED_CHOICES)
def traffic(
    queries: ContextLayout,
    keys: ContextLayout,
    masks: tuple[AttentionMask, ...],
    heads: tuple[int, int, int],
    element_bytes: int,
    sequences: int,
    backward: bool = True,
    methods: tuple[str, ...] = METHODS,
) -> MethodChoice:
    """The choice and the bytes that decided it, of tokens as they are laid out.

    Args:
        masks: one per sequence or one for all; they say which keys must travel.
        heads: Hq, Hk and D.
        element_bytes: of one element of Q, K and V.
        sequences: B.

    Raises:
        AttentionTrafficError: none of the methods can be used.
    """
    shape = AttentionShape(
        queries.sizes, keys.sizes, *heads, activation_bytes=element_bytes, sequences=sequences
    )
    ranks = range(shape.ranks)
    needed = [
        [
            sum(b - a for a, b in needed_keys(masks, queries.ranges[me], keys.ranges[other]))
            for other in ranks
        ]
        for me in ranks
    ]
    return choose_method(shape, needed, backward=backward, methods=methods)
