"""Masks for cross attention from the tensors that Hugging Face models take.

Legend: ``B`` sequences, ``T`` text tokens, ``I`` items (images, or the tiles of images), ``V``
visual tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from raymm.errors import ModelError
from raymm.kernels.mask.convert import from_dense
from raymm.kernels.mask.mask import AttentionMask, query_rows

BLIND_ROWS = ("nothing", "everything")
"""Accepted values of ``blind``: keys of rows that see no item."""


def cross_masks(
    shown: torch.Tensor, tokens_per_item: int, *, blind: str = "nothing"
) -> tuple[AttentionMask, ...]:
    """Return one mask per sequence of the visual tokens that each text token sees.

    Idefics: ``cross_masks(image_attention_mask, tokens_per_image)``. Mllama:
    ``cross_masks(cross_attention_mask.flatten(2), patches_per_tile, blind="everything")``: rows
    without a visible tile attend to all tiles, and only the layer's MLP ignores them.

    Args:
        shown: (B, T, I), nonzero where a text token sees an item. Covers the full text, and is the
            same on every process.
        tokens_per_item: visual tokens of each item; V = I * tokens_per_item.
        blind: keys of rows that see no item; one of :data:`BLIND_ROWS`.

    Returns:
        B masks of T rows and V keys. Sequences with equal ``shown`` share one object.

    Raises:
        ModelError: not (B, T, I), no tokens per item, an unknown ``blind``, or the items cannot be
            expressed with two runs per row and 63 kinds of keys.
    """
    if shown.dim() != 3:
        raise ModelError(f"shown items must be (B, T, I), got {tuple(shown.shape)}")
    if tokens_per_item < 1:
        raise ModelError(f"tokens_per_item must be at least 1, got {tokens_per_item}")
    if blind not in BLIND_ROWS:
        raise ModelError(f"blind must be one of {', '.join(BLIND_ROWS)}, got {blind!r}")
    distinct: dict[bytes, AttentionMask] = {}
    masks = []
    for sees in (shown != 0).cpu().numpy():
        if blind == "everything":
            sees = sees | ~sees.any(axis=1, keepdims=True)
        masks.append(distinct.setdefault(sees.tobytes(), _of_items(sees, tokens_per_item)))
    return tuple(masks)


def _of_items(sees: np.ndarray, tokens: int) -> AttentionMask:
    """Return the mask of one sequence, (T, I) bool. Builds a mask of items for rows that differ
    from the row before, then multiplies every bound by the tokens of an item."""
    length, items = sees.shape
    changes = np.flatnonzero((sees[1:] != sees[:-1]).any(axis=1)) + 1
    starts = np.append(np.zeros(min(length, 1), dtype=np.int64), changes)
    small = from_dense(torch.from_numpy(sees[starts]))
    lo, hi, lo2, hi2 = small.bounds() * tokens
    attend = small.rows().attend.numpy()
    table = query_rows(starts, lo=lo, hi=hi, lo2=lo2, hi2=hi2, attend=attend)
    keys = small.key_table * np.array([tokens, 1])
    return AttentionMask(table, keys, length, items * tokens)
