"""Microbatches of images and text, of random numbers."""

from __future__ import annotations

from typing import Any

import torch


def microbatches(
    count: int, rows: int, tokens: int, vocabulary: int, size: int
) -> list[dict[str, Any]]:
    """The same ones whenever they are asked for.

    Args:
        count: how many.
        rows: of each, with an image each.
        tokens: of a row's text.
        vocabulary: of the tokens.
        size: of an image, in pixels.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        pixels = torch.randn((rows, 3, size, size), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone(), "vision": {"pixel_values": pixels}})
    return found
