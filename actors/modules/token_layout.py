"""What every token of a merged microbatch is, and the attention masks that follow from it.

A layout is (3, B, T) int16: the kind of each token (0 text, n the n-th encoder), the number
of its item within the row, and its document within the row (-1: padding, on the right). It
travels with the microbatch across pipeline stages, six bytes a token; every stage makes its
masks from it. It travels instead of the masks' tables because receives need to know shapes ahead:
a layout's follows from the microbatch's key, a table's length depends on where images are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raymm.errors import ModelError
from raymm.kernels.host_copies import on_host
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span, kinds_and_items

PADDING = -1
_NUMBERS = torch.iinfo(torch.int16).max

MaskPolicy = Callable[..., AttentionMask]
"""``policy(length, spans, document_lengths=lengths) -> AttentionMask`` of one row: its tokens,
the encoders' items in them (:class:`raymm.kernels.mask.spans.Span`), and the lengths of its
documents, of which right padding is the last."""


def causal(length: int, spans: Sequence[Span], document_lengths: Sequence[int]) -> AttentionMask:
    """Every token sees what is before it in its document.

    Args:
        length: tokens of the row.
        spans: of items; a causal mask does not ask where they lie.
        document_lengths: tokens of each document of the row, in order.
    """
    return mask_patterns.documents(document_lengths)


def isolated(length: int, spans: Sequence[Span], document_lengths: Sequence[int]) -> AttentionMask:
    """:func:`raymm.kernels.mask.patterns.multimodal` with every item by itself.

    Args:
        length: tokens of the row.
        spans: where items lie among them.
        document_lengths: tokens of each document of the row, in order.
    """
    return mask_patterns.multimodal(
        length, spans, isolate=True, document_lengths=document_lengths
    )


MASKS: dict[str, MaskPolicy] = {
    "causal": causal,
    "multimodal": mask_patterns.multimodal,
    "multimodal_isolated": isolated,
    "causal_with_own_image": mask_patterns.causal_with_own_image,
}
"""Mask policies by the name they have in a configuration."""


def text_layout(attention_mask: torch.Tensor) -> torch.Tensor:
    """The layout of rows of text: (B, T) 1 for tokens and 0 for padding -> (3, B, T) int16.

    Raises:
        ValueError: padding that is not on the right.
    """
    real = attention_mask.bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("attention_mask has padding that is not on the right")
    layout = torch.zeros(3, *real.shape, dtype=torch.int16, device=real.device)
    layout[2].masked_fill_(~real, PADDING)
    return layout


def checked_layout(layout: Any, shape: Sequence[int]) -> torch.Tensor:
    """A layout from elsewhere, (3, B, T), as int16 on the host.

    Args:
        shape: (B, T) of what it is for.

    Raises:
        ValueError: another shape, or not whole numbers of 16 bits.
    """
    expected = (3, *shape)
    if not isinstance(layout, torch.Tensor):
        raise ValueError(f"token_layout that is a {type(layout).__name__}, not a tensor")
    if tuple(layout.shape) != expected:
        raise ValueError(f"token_layout of shape {tuple(layout.shape)}; expected {expected}")
    layout = on_host(layout)
    short = layout.to(torch.int16)
    if not torch.equal(short.to(layout.dtype), layout):
        raise ValueError("token_layout with other than whole numbers of 16 bits")
    return short


def place_items(
    layout: torch.Tensor, places: torch.Tensor, kind: int, tokens_per_item: int
) -> None:
    """Enter an encoder's items into a layout, in place.

    Args:
        layout: (3, B, T) int16, changed in place.
        places: (B, T) bool: the encoder's tokens; those of a row belong to its items in order.
        kind: the encoder's number, from 1.
        tokens_per_item: how many tokens an item has.
    """
    item = (places.cumsum(dim=1) - 1).div(max(tokens_per_item, 1), rounding_mode="floor")
    layout[0][places] = kind
    layout[1][places] = (item[places] % _NUMBERS + 1).to(torch.int16)


def row_masks(layout: torch.Tensor, policy: MaskPolicy) -> tuple[AttentionMask, ...]:
    """One mask per row; rows that look the same share one.

    Raises:
        ModelError: if the policy refuses the row, or returns what is no mask of it.
    """
    rows = on_host(layout).numpy().transpose(1, 0, 2)
    masks: dict[bytes, AttentionMask] = {}
    return tuple(_row_mask(row, policy, masks) for row in rows)


def document_lengths(layout: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Per row, tokens of each of its documents, in order; right padding is the last.

    Args:
        layout: (3, B, T).
    """
    return tuple(tuple(_lengths(row)) for row in on_host(layout)[2].numpy())


def _lengths(documents: np.ndarray[Any, Any]) -> list[int]:
    starts = np.flatnonzero(np.diff(documents, prepend=documents[:1] - 1))
    return np.diff(np.append(starts, len(documents))).tolist()


def _row_mask(
    row: np.ndarray[Any, Any], policy: MaskPolicy, masks: dict[bytes, AttentionMask]
) -> AttentionMask:
    key = row.tobytes()
    if key not in masks:
        kinds, items, documents = row
        lengths = _lengths(documents)
        # Items of two documents are two, also where they touch and have the same number.
        spans = kinds_and_items(kinds, items + _NUMBERS * documents.astype(np.int64))
        masks[key] = mask = policy(len(kinds), spans, document_lengths=lengths)
        if not isinstance(mask, AttentionMask) or mask.shape != (len(kinds),) * 2:
            name = getattr(policy, "__name__", type(policy).__name__)
            raise ModelError(
                f"mask policy {name} returned {mask!r} for a row of {len(kinds)} tokens; expected "
                f"an AttentionMask of {len(kinds)} queries and as many keys"
            )
    return masks[key]
