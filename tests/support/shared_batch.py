"""Batch with sharded text and visual tokens, as the arguments of a model's forward.

Legend: ``B`` sequences, ``T`` text tokens, ``V`` visual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import context_attention
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.cross_attention import CROSS_ARGUMENT, CrossAttention, MethodChooser, chosen
from raymm.kernels.hf.self_attention import ATTEND_ARGUMENT, MASK_ARGUMENT
from raymm.kernels.mask.mask import AttentionMask, query_rows


@dataclass(frozen=True)
class SharedBatch:
    """Distribution of a batch's text and visual tokens, and its masks.

    Attributes:
        exchange: this process's end of the group.
        text: layout of text tokens; every process has some.
        visual: layout of visual tokens.
        text_masks: (T, T), one per sequence.
        cross_masks: (T, V), one per sequence.
        self_method, cross_method: one of ``context_parallel.METHODS``, or a function that selects
            one.
        recompute: same as in :class:`raymm.kernels.hf.cross_attention.CrossAttention`.
    """

    exchange: Exchange
    text: ContextLayout
    visual: ContextLayout
    text_masks: tuple[AttentionMask, ...]
    cross_masks: tuple[AttentionMask, ...]
    self_method: str | MethodChooser = "gather"
    cross_method: str | MethodChooser = "rotate"
    recompute: bool = False

    def of_text(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of a tensor with T along dimension 1."""
        return whole[:, self.text.positions(self.exchange.rank)]

    def of_visual(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of a tensor with V along dimension 1.

        A process without tokens gets one invisible token of zeros, because models cannot run on
        none.
        """
        part = whole[:, self.visual.positions(self.exchange.rank)]
        return part if part.shape[1] else whole[:, :1] * 0

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for the model's forward."""
        group = ContextGroup(self.exchange, self.text, self.text)

        def attend(query, key, value, masks, *, scale=None, softcap=None):
            method = chosen(self.self_method, group, masks, query, key)
            call = ContextCall(group, masks, scale, softcap)
            return context_attention(query, key, value, call, method=method)

        crossed = ContextGroup(self.exchange, self.text, self.visual)
        return {
            MASK_ARGUMENT: self.text_masks, ATTEND_ARGUMENT: attend,
            CROSS_ARGUMENT: CrossAttention(
                crossed, self.cross_masks, self.cross_method, self.recompute
            ),
        }


def padded_causal_masks(attention_mask: torch.Tensor) -> tuple[AttentionMask, ...]:
    """Return causal masks that hide padding, one per sequence; equal ones are one object.

    Args:
        attention_mask: (B, T), 0 for padding, which is only at the ends of a sequence.
    """
    distinct: dict[tuple[int, int], AttentionMask] = {}
    masks = []
    for row in (attention_mask != 0).numpy():
        tokens = np.flatnonzero(row)
        first, stop = (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)
        masks.append(distinct.setdefault((first, stop), _causal_within(len(row), first, stop)))
    return tuple(masks)


def _causal_within(length: int, first: int, stop: int) -> AttentionMask:
    """Return a mask: tokens [first, stop) see themselves and earlier ones, later rows all of them.
    """
    starts = np.array([0, first, stop])
    table = query_rows(starts, lo=[0, first, first], hi=[0, 1, stop], hi_slope=[0, 1, 0])
    return AttentionMask(table, np.array([[0, 1]]), length, length)
