"""Microbatches of random images and text."""

from __future__ import annotations

from typing import Any

import torch


def microbatches(
    count: int, rows: int, tokens: int, vocabulary: int, size: int
) -> list[dict[str, Any]]:
    """Return the same microbatches on every call.

    Args:
        rows: rows per microbatch, with one image each.
        tokens: text tokens per row.
        size: image side in pixels.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        pixels = torch.randn((rows, 3, size, size), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone(), "vision": {"pixel_values": pixels}})
    return found
