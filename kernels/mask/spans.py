"""Spans of tokens from encoders: their positions among text and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raymm.errors import ModelError

TEXT = 0
"""Kind of text tokens; encoders have kinds 1 to 62."""
MAX_KIND = 62


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) from one item (image, audio clip) of an encoder.

    Attributes:
        kind: number of the encoder, 1 to 62.
    """

    start: int
    stop: int
    kind: int = 1


def kinds_and_items(
    kinds: Sequence[int] | np.ndarray, items: Sequence[int] | np.ndarray | None = None
) -> list[Span]:
    """Convert per-token arrays to spans: the kind of every token (0 for text), and optionally its
    item number, to separate adjacent items of one encoder.

    Raises:
        ModelError: the arrays have different lengths, or a kind is outside 0 to 62.
    """
    kinds = np.asarray(kinds, dtype=np.int64)
    items = np.zeros_like(kinds) if items is None else np.asarray(items, dtype=np.int64)
    if kinds.shape != items.shape or kinds.ndim != 1:
        raise ModelError(f"kinds and items must be (T,), got {kinds.shape} and {items.shape}")
    changes = np.flatnonzero((np.diff(kinds) != 0) | (np.diff(items) != 0)) + 1
    starts = np.concatenate([[0], changes]) if len(kinds) else changes
    stops = np.append(starts[1:], len(kinds))
    return [
        Span(int(start), int(stop), int(kinds[start]))
        for start, stop in zip(starts, stops, strict=False)
        if kinds[start] != TEXT
    ]


def consecutive(lengths: Sequence[int], what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops, (S,) int64 each, of concatenated parts of the given lengths in
    tokens. ``what`` names the parts in the error.

    Raises:
        ModelError: a length is negative.
    """
    sizes = np.asarray(list(lengths), dtype=np.int64)
    if (sizes < 0).any():
        raise ModelError(f"{what} lengths must not be negative, got {sizes.tolist()}")
    stops = np.cumsum(sizes)
    return stops - sizes, stops


def check_total(stops: np.ndarray, length: int) -> None:
    """Check that documents that end at ``stops`` fill a sequence of ``length`` tokens.

    Raises:
        ModelError: they do not.
    """
    total = int(stops[-1]) if len(stops) else 0
    if total != length:
        raise ModelError(f"document lengths add up to {total}, the sequence has {length} tokens")


def span_arrays(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, stops, kinds. A last entry of zeros makes index -1 (text) valid."""
    rows = np.array([(s.start, s.stop, s.kind) for s in spans] + [(0, 0, 0)], dtype=np.int64)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def layout(
    length: int, spans: Sequence[Span], document_lengths: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split a sequence at the edges of spans and documents.

    Args:
        spans: items, ascending.
        document_lengths: tokens of each packed document; default: one document.

    Returns:
        Starts (S,) of the segments, the span of each (-1 for text), and (2, S) start and stop of
        its document.

    Raises:
        ModelError: spans overlap, leave the sequence or cross the end of a document, a kind is out
            of range, or documents do not add up to ``length``.
    """
    lengths = [length] if document_lengths is None else document_lengths
    document_starts, document_stops = consecutive(lengths, "document")
    check_total(document_stops, length)
    item_starts, item_stops, kinds = span_arrays(spans)
    _check_spans(spans, item_starts[:-1], item_stops[:-1], kinds[:-1], length)
    edges = np.concatenate([[0], document_starts, item_starts, item_stops])
    starts = np.unique(edges)
    starts = starts[starts < length]
    # Among spans with the same start, the last one is the only one that may not be empty.
    item = np.searchsorted(item_starts[:-1], starts, side="right") - 1
    item = np.where(starts < item_stops[item], item, -1)
    document = np.searchsorted(document_starts, starts, side="right") - 1
    ends = np.stack([document_starts[document], document_stops[document]])
    in_item = item >= 0
    crossing = in_item & ((item_starts[item] < ends[0]) | (item_stops[item] > ends[1]))
    if crossing.any():
        span = spans[int(item[np.flatnonzero(crossing)[0]])]
        raise ModelError(f"{span} crosses the end of a document")
    return starts, item, ends


def _check_spans(
    spans: Sequence[Span], starts: np.ndarray, stops: np.ndarray, kinds: np.ndarray, length: int
) -> None:
    is_invalid = (kinds < 1) | (kinds > MAX_KIND)
    if is_invalid.any():
        raise ModelError(f"span kinds must be 1 to {MAX_KIND}, got {kinds[is_invalid].tolist()}")
    bad = (starts > stops) | (starts < 0) | (stops > length)
    bad[1:] |= starts[1:] < stops[:-1]
    if bad.any():
        raise ModelError(
            f"{spans[int(np.flatnonzero(bad)[0])]}: spans must ascend, not overlap and lie "
            f"within [0, {length})"
        )
