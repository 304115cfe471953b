"""Layout of the tokens of a merged microbatch, and the attention masks derived from it.

A layout is (3, B, T) int16: the kind of each token (0 text, n the n-th encoder), the number of its
item within the row, and its document within the row (-1: padding, on the right). Stages exchange
layouts, not mask tables, because receivers must know shapes in advance.
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
"""``policy(length, spans, document_lengths=lengths) -> AttentionMask`` for one row, given its token
count, the encoders' items (:class:`raymm.kernels.mask.spans.Span`), and the lengths of its
documents; right padding is the last document."""


def causal(length: int, spans: Sequence[Span], document_lengths: Sequence[int]) -> AttentionMask:
    """Return a mask where every token of a row sees the earlier tokens of its document."""
    return mask_patterns.documents(document_lengths)


def isolated(length: int, spans: Sequence[Span], document_lengths: Sequence[int]) -> AttentionMask:
    """Return :func:`raymm.kernels.mask.patterns.multimodal` with isolated items."""
    return mask_patterns.multimodal(length, spans, isolate=True, document_lengths=document_lengths)


MASKS: dict[str, MaskPolicy] = {
    "causal": causal,
    "multimodal": mask_patterns.multimodal,
    "multimodal_isolated": isolated,
    "causal_with_own_image": mask_patterns.causal_with_own_image,
}
"""Mask policies by their name in a configuration."""


def text_layout(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the layout of text rows: (B, T), 1 for tokens and 0 for padding -> (3, B, T) int16.
    Raise a ``ValueError`` if there is padding that is not on the right."""
    real = attention_mask.bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("attention_mask has padding that is not on the right")
    layout = torch.zeros(3, *real.shape, dtype=torch.int16, device=real.device)
    layout[2].masked_fill_(~real, PADDING)
    return layout


def checked_layout(layout: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return a custom layout, (3, B, T) for shape (B, T), as int16 on the host. Raise a
    ``ValueError`` if the layout has another shape, or values that are not 16-bit integers."""
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
    """Enter an encoder's items into a layout (3, B, T) int16, in place.

    Args:
        places: (B, T) bool: the encoder's tokens; those of a row belong to its items in order.
        kind: number of the encoder, from 1.
    """
    item = (places.cumsum(dim=1) - 1).div(max(tokens_per_item, 1), rounding_mode="floor")
    layout[0][places] = kind
    layout[1][places] = (item[places] % _NUMBERS + 1).to(torch.int16)


def row_masks(layout: torch.Tensor, policy: MaskPolicy) -> tuple[AttentionMask, ...]:
    """Return one mask per row; identical rows share a mask. Raise a ``ModelError`` if the policy
    rejects the row or does not return a mask of its size."""
    rows = on_host(layout).numpy().transpose(1, 0, 2)
    masks: dict[bytes, AttentionMask] = {}
    return tuple(_row_mask(row, policy, masks) for row in rows)


def document_lengths(layout: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the token count of each document per row of (3, B, T); right padding is the last."""
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
        # Adjacent items with equal numbers in different documents are different items.
        spans = kinds_and_items(kinds, items + _NUMBERS * documents.astype(np.int64))
        masks[key] = mask = policy(len(kinds), spans, document_lengths=lengths)
        if not isinstance(mask, AttentionMask) or mask.shape != (len(kinds),) * 2:
            name = getattr(policy, "__name__", type(policy).__name__)
            raise ModelError(
                f"mask policy {name} returned {mask!r} for a row of {len(kinds)} tokens; expected "
                f"an AttentionMask of {len(kinds)} queries and as many keys"
            )
    return masks[key]
