"""Synthetic items, used to find the towers of a model if its data have no items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from raymm.data.conversations.processor import IDS, ModelProcessor
from raymm.errors import USER_CODE_RAISES

# Pixels per side of a picture; seconds of a sound; frames of a video.
_SIDE, _SECONDS, _FRAMES = 112, 1.0, 4


def example_items(processor: ModelProcessor) -> Iterator[tuple[str, dict[str, Sequence[Any]]]]:
    """Yield a text with one item, and its media by kind, for each kind that a processor accepts. Of
    pictures and videos, only the first accepted kind is used, because most models have one tower
    for both."""
    used_kinds: set[str] = set()
    for kind in ("image", "video", "audio"):
        if kind == "video" and "image" in used_kinds:
            continue
        for text in filter(None, (processor.markers[kind], processor.item_tokens.get(kind))):
            try:
                media: dict[str, Sequence[Any]] = {kind: [_item(processor, kind)]}
                tensors = processor([text], [media])
            except USER_CODE_RAISES:  # any error for a kind that is not accepted
                continue
            if _has_items(tensors):
                used_kinds.add(kind)
                yield text, media
                break


def _item(processor: ModelProcessor, kind: str) -> Any:
    if kind == "audio":
        rate = processor.sampling_rate
        return np.sin(np.arange(int(_SECONDS * rate)) * (880 * np.pi / rate)).astype(np.float32)
    from PIL import Image

    shades = np.add.outer(np.arange(_SIDE), np.arange(_SIDE)) % 256
    picture = Image.fromarray(np.stack([shades] * 3, -1).astype(np.uint8))
    return picture if kind == "image" else [picture] * _FRAMES


def _has_items(tensors: dict[str, torch.Tensor]) -> bool:
    """Return True if there are tensors other than those of tokens."""
    shape = tensors[IDS].shape
    return any(value.shape[:2] != shape and value.is_floating_point() for value in tensors.values())
