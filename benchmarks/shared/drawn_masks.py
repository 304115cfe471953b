"""Random masks for token distribution.

Packed documents of lognormal lengths, one long document among many short ones, images in documents,
and causal blockwise masks, in which a few rows see everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span

SHORTEST = 16  # tokens per document
IMAGES = (256, 576, 1196)  # tokens: SigLIP at 256 pixels, CLIP at 336, Qwen2-VL of 1280x720
TEXT_BETWEEN = 300  # tokens between images, mean
# causal blockwise masks: tokens per block; visible blocks
BLOCKS, LOCAL = (64, 128, 256, 512), (1, 4)

Draw = Callable[[int, int, np.random.Generator], AttentionMask]
"""Function (tokens, padding, generator) that draws a mask; padding is a separate document."""


def _lengths(
    tokens: int, median: float, sigma: float, generator: np.random.Generator
) -> list[int]:
    """Return lognormal document lengths that fill a sequence."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(generator.lognormal(math.log(median), sigma))
        lengths.append(min(left, max(SHORTEST, drawn)))
    return lengths


def documents(tokens: int, padding: int, generator: np.random.Generator) -> AttentionMask:
    """Pack 4 to 64 documents of lognormal lengths."""
    median = tokens / generator.uniform(4, 64)
    lengths = _lengths(tokens, median, generator.uniform(0.3, 1.2), generator)
    return patterns.documents([*lengths, padding])


def long_tail(tokens: int, padding: int, generator: np.random.Generator) -> AttentionMask:
    """Draw one document of a tenth to half of all tokens, then documents of about 200 tokens."""
    first = int(tokens * generator.uniform(0.1, 0.5))
    return patterns.documents([first, *_lengths(tokens - first, 200, 1.0, generator), padding])


def images(tokens: int, padding: int, generator: np.random.Generator) -> AttentionMask:
    """Draw 2 to 16 documents of text and images; an image sees all images, or only itself."""
    median = tokens / generator.uniform(2, 16)
    lengths = _lengths(tokens, median, generator.uniform(0.3, 1.0), generator)
    spans: list[Span] = []
    start = 0
    for length in lengths:
        at = start
        while True:
            at += int(generator.exponential(TEXT_BETWEEN))
            image = int(generator.choice(IMAGES))
            if at + image >= start + length:
                break
            spans.append(Span(at, at + image, 1))
            at += image
        start += length
    return patterns.multimodal(
        tokens + padding, spans, isolate=bool(generator.integers(2)),
        document_lengths=[*lengths, padding],
    )


def blockwise(tokens: int, padding: int, generator: np.random.Generator) -> AttentionMask:
    """Draw a causal blockwise mask: the last block sees everything, others little."""
    block = int(generator.choice(BLOCKS))
    local = int(generator.integers(LOCAL[0], LOCAL[1] + 1))
    return patterns.causal_blockwise(tokens + padding, block, local)


DRAWS: dict[str, Draw] = {
    "documents": documents, "long tail": long_tail, "images": images,
    "causal blockwise": blockwise,
}
