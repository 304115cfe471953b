"""What the layers of a model are told where processes share a sample's text tokens, and its
visual tokens for cross attention.

It travels through the model's forward as keyword arguments, so microbatches with different
masks may be under way at once, and a layer that runs again in the backward pass is told the same.

Legend: ``B`` sequences, ``T`` text tokens, ``V`` visual tokens, ``n`` processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import METHODS, context_attention
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.self_attention import ATTEND_ARGUMENT, MASK_ARGUMENT
from raymm.kernels.host_copies import to_device
from raymm.kernels.mask.mask import AttentionMask, MaskError, as_masks

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


@dataclass(frozen=True)
class SharedBatch:
    """Who has which text tokens and which visual tokens of a batch, and who sees what.

        share = SharedBatch(Exchange(group), text, visual, text_masks, cross_masks)
        model(input_ids=share.of_text(ids), position_ids=share.of_text(positions),
              cross_attention_states=share.of_visual(states), use_cache=False,
              **share.arguments())

    Attributes:
        exchange: this process's end of the group.
        text: who has which text tokens; everyone has some.
        visual: who has which visual tokens; None for a batch without.
        text_masks: (T, T), one per sequence or one for all.
        cross_masks: (T, V), likewise (``cross_masks.cross_masks``).
        self_method, cross_method: one of ``context_parallel.METHODS``, or what chooses one.
        recompute: see :class:`CrossAttention`.

    Raises:
        MaskError: layouts of another number of processes, a process without text, masks that
            do not fit, visual tokens without cross masks or the reverse.
        ValueError: an unknown method, or recomputation with ulysses.
    """

    exchange: Exchange
    text: ContextLayout
    visual: ContextLayout | None
    text_masks: tuple[AttentionMask, ...]
    cross_masks: tuple[AttentionMask, ...] = ()
    self_method: str | MethodChooser = "gather"
    cross_method: str | MethodChooser = "rotate"
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("text_masks", "cross_masks"):
            value = getattr(self, name)
            masks = (value,) if isinstance(value, AttentionMask) else tuple(value)
            object.__setattr__(self, name, masks)
        for name in ("self_method", "cross_method"):
            method = getattr(self, name)
            if not callable(method) and method not in METHODS:
                raise ValueError(f"{name} is {method!r}; expected one of {', '.join(METHODS)}")
        if self.recompute and self.cross_method == "ulysses":
            raise ValueError("cross_method 'ulysses' cannot recompute; take another, or not")
        if 0 in self.text.sizes:
            raise MaskError(
                f"process {self.text.sizes.index(0)} has no text tokens; models cannot run on none"
            )
        length = self.text.length
        as_masks(self.text_masks, max(len(self.text_masks), 1), length, length)
        if (self.visual is None) != (not self.cross_masks):
            raise MaskError("visual tokens need cross_masks, and cross_masks visual tokens")
        if self.visual is not None:
            if not self.visual.length:
                raise MaskError("visual has no tokens; a batch without has visual=None")
            as_masks(self.cross_masks, len(self.cross_masks), length, self.visual.length)
        _ = self.text_group, self.cross_group  # they check the number of processes

    @cached_property
    def text_group(self) -> ContextGroup:
        """Of self attention."""
        return ContextGroup(self.exchange, self.text, self.text)

    @cached_property
    def cross_group(self) -> ContextGroup | None:
        """Of cross attention."""
        return None if self.visual is None else ContextGroup(self.exchange, self.text, self.visual)

    def of_text(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This process's part of a tensor with T along ``dim``: ids, embeddings, position ids,
        what each token is to predict, rows of a mask."""
        return _part(whole, self.text, self.exchange.rank, dim)

    def of_visual(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This process's part of a tensor with V along ``dim``; one token of zeros, which nothing
        attends to, if it has none: models cannot run on none."""
        if self.visual is None:
            raise MaskError("the batch has no visual tokens")
        part = _part(whole, self.visual, self.exchange.rank, dim)
        if part.shape[dim]:
            return part
        # Multiplied, not made: with it a backward pass comes by here as it does elsewhere.
        return whole.narrow(dim, 0, 1) * 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the model's forward."""

        def attend(query, key, value, masks, *, scale=None, softcap=None):
            group = self.text_group
            method = chosen(self.self_method, group, masks, query, key)
            return context_attention(
                query, key, value, masks, group, method=method, scale=scale, softcap=softcap
            )

        keywords: dict[str, Any] = {MASK_ARGUMENT: self.text_masks, ATTEND_ARGUMENT: attend}
        if self.cross_group is not None:
            keywords[CROSS_ARGUMENT] = CrossAttention(
                self.cross_group, self.cross_masks, self.cross_method, self.recompute
            )
        return keywords


def _part(whole: torch.Tensor, layout: ContextLayout, rank: int, dim: int) -> torch.Tensor:
    if whole.shape[dim] != layout.length:
        raise MaskError(
            f"a tensor of shape {tuple(whole.shape)} has not {layout.length} tokens along {dim}"
        )
    return whole.index_select(dim, to_device(layout.positions(rank), whole.device))
