"""Masks of every pattern of `kernels/mask/patterns.py`, and random segment tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import ALL_KINDS, AttentionMask, query_rows
from raymm.kernels.mask.spans import Span

KINDS = 3


def table(
    seed: int, n_queries: int, n_keys: int, query_segments: int = 6, key_segments: int = 4
) -> AttentionMask:
    """Return the random segment table of a seed."""
    rng = np.random.default_rng(seed)
    starts = _starts(rng, n_queries, query_segments)
    size = len(starts)
    slopes = rng.integers(0, 2, (size, 4))
    # A moving bound is placed near the diagonal of its rows, so that it often lies within.
    centre = np.where(slopes == 1, -starts[:, None], 0)
    bases = rng.integers(-n_keys // 4 - 1, n_keys + n_keys // 4 + 1, (size, 4)) + centre
    second = rng.random(size) < 0.5
    bases[:, 2:][~second], slopes[:, 2:][~second] = 0, 0
    attend = np.where(rng.random(size) < 0.5, ALL_KINDS, rng.integers(0, 2**KINDS, size))
    rows = query_rows(
        starts,
        lo=bases[:, 0], hi=bases[:, 1], lo2=bases[:, 2], hi2=bases[:, 3],
        lo_slope=slopes[:, 0], hi_slope=slopes[:, 1],
        lo2_slope=slopes[:, 2], hi2_slope=slopes[:, 3],
        attend=attend,
    )  # fmt: skip
    key_starts = _starts(rng, n_keys, key_segments)
    identity = rng.integers(0, 2**KINDS, len(key_starts))
    return AttentionMask(rows, np.stack([key_starts, identity], axis=1), n_queries, n_keys)


def spans(
    seed: int, length: int, *, kinds: int = 2, boundaries: tuple[int, ...] = ()
) -> list[Span]:
    """Return spans of about an eighth of the length, some adjacent, with text between most.

    No span crosses one of ``boundaries``.
    """
    rng = np.random.default_rng(seed)
    found, at = [], 0
    while at < length:
        start = at + int(rng.integers(0, length // 8 + 2)) * int(rng.random() < 0.8)
        stop = start + int(rng.integers(1, length // 6 + 2))
        stop = min([stop, length, *(b for b in boundaries if b > start)])
        if start < stop:
            found.append(Span(start, stop, int(rng.integers(1, kinds + 1))))
        at = max(stop, at + 1)
    return found


def lengths(seed: int, total: int, parts: int) -> list[int]:
    """Return ``parts`` sizes that add up to ``total``; some may be 0."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, total + 1, parts - 1))
    return np.diff([0, *cuts, total]).tolist()


def every_pattern(length: int, seed: int = 0) -> dict[str, Callable[[], AttentionMask]]:
    """Return a builder of every pattern with ``length`` tokens, by name."""
    split = lengths(seed, length, 4)
    ends = tuple(np.cumsum(split).tolist())
    items = spans(seed, length)
    packed_items = spans(seed, length, boundaries=ends)
    window = max(length // 5, 1)
    prefix = length // 3
    spoken = [(1, length // 4), (2, length // 8), (1, length // 8)]
    text = length - sum(tokens for _, tokens in spoken)
    pictures = sorted(np.random.default_rng(seed).integers(0, length, 4).tolist())
    sizes = [max(length // 9, 1), 3, max(length // 5, 1), 17]
    return {
        "full": lambda: patterns.full(length),
        "causal": lambda: patterns.causal(length),
        "window": lambda: patterns.causal(length, window),
        "documents": lambda: patterns.documents(split),
        "whole_documents": lambda: patterns.documents(split, causal=False),
        "ep": lambda: patterns.prepended(spoken, text),
        "ep_isolated": lambda: patterns.prepended(spoken, text, isolate=True),
        "ee": lambda: patterns.embedded(length, items),
        "ee_isolated": lambda: patterns.embedded(length, items, isolate=True),
        "mp": lambda: patterns.packed(split, packed_items),
        "mp_isolated": lambda: patterns.packed(split, packed_items, isolate=True),
        "mp_window": lambda: patterns.multimodal(
            length, packed_items, document_lengths=split, window=window
        ),
        "own_image": lambda: patterns.causal_with_own_image(length, items),
        "own_image_packed": lambda: patterns.causal_with_own_image(
            length, packed_items, document_lengths=split
        ),
        "own_image_window": lambda: patterns.causal_with_own_image(
            length, packed_items, document_lengths=split, window=window
        ),
        "prefix": lambda: patterns.prefix_causal(length, [prefix]),
        "prefix_packed": lambda: patterns.prefix_causal(length, [n // 3 for n in split], split),
        "lambda": lambda: patterns.sinks_and_window(length, max(length // 20, 1), window),
        "blockwise": lambda: patterns.causal_blockwise(length, max(length // 9, 1)),
        "shared_question": lambda: patterns.shared_question(
            length // 5, lengths(seed, length - length // 5, 4)
        ),
        "cross": lambda: patterns.cross_images(length, pictures, sizes),
        "cross_all": lambda: patterns.cross_images(
            length, pictures, sizes, document_lengths=split, only_last=False
        ),
    }


def _starts(rng: np.random.Generator, size: int, parts: int) -> np.ndarray:
    """Return sorted segment starts; empty without positions."""
    if not size:
        return np.zeros(0, dtype=np.int64)
    inner = rng.integers(1, size, parts - 1) if size > 1 else []
    return np.unique(np.concatenate([[0], inner])).astype(np.int64)
