"""Builders of masks from user-level terms: spans of images and audio, documents, windows, answers.

Every builder returns an :class:`AttentionMask` of a few segments. Patterns of Cornstarch v2 (Fig.
7, App. C and F): :func:`prepended` (EP), :func:`embedded` (EE), :func:`packed` (MP),
:func:`sinks_and_window` (lambda), :func:`causal_blockwise`, :func:`shared_question`. Gemma 3 and
PaliGemma: :func:`causal_with_own_image`, :func:`prefix_causal`. Flamingo: :func:`cross_images`.

``spans`` are items in ascending order of position. ``document_lengths`` are the tokens of each
packed document, T in sum; default: one document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raymm.errors import ModelError
from raymm.kernels.mask.mask import ALL_KINDS, AttentionMask, query_rows
from raymm.kernels.mask.spans import TEXT, Span, check_total, consecutive, layout, span_arrays


def full(n_queries: int, n_keys: int | None = None) -> AttentionMask:
    """Return a mask in which every row sees every key."""
    n_keys = n_queries if n_keys is None else n_keys
    return _mask(query_rows([0], hi=n_keys), n_queries, n_keys)


def causal(length: int, window: int | None = None) -> AttentionMask:
    """Return a causal mask. With a window, a token sees the last ``window`` tokens, itself included
    (Mistral, Gemma)."""
    return _with_window(_mask(query_rows([0], hi=1, hi_slope=1), length, length), window)


def documents(lengths: Sequence[int], *, causal: bool = True) -> AttentionMask:
    """Return the mask of packed documents: a token sees its own document, causally or
    (``causal=False``) in full.

    Raises:
        ModelError: a length is negative.
    """
    starts, stops = consecutive(lengths, "document")
    length = int(stops[-1]) if len(stops) else 0
    table = query_rows(starts, lo=starts, hi=1 if causal else stops, hi_slope=int(causal))
    return _mask(table, length, length)


def multimodal(
    length: int,
    spans: Sequence[Span],
    *,
    isolate: bool = False,
    document_lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> AttentionMask:
    """Return the mask of encoder outputs among text (Cornstarch v2, Fig. 7). A text token sees all
    earlier tokens of its document; a modality token sees only the tokens of its encoder.

    Args:
        spans: items; the rest is text.
        isolate: a modality token sees only its item, not the encoder's other items.
        window: narrows the past that text sees.

    Raises:
        ModelError: spans overlap, leave the sequence or cross the end of a document; a kind is
            outside 1 to 62; or the lengths do not add up to T.
    """
    starts, items, ends = layout(length, spans, document_lengths)
    is_text = items < 0
    item_starts, item_stops, kinds = span_arrays(spans)
    kind = np.where(is_text, TEXT, kinds[items])
    lo, hi = ends[0].copy(), np.where(is_text, 1, ends[1])
    if isolate:
        lo = np.where(is_text, lo, item_starts[items])
        hi = np.where(is_text, hi, item_stops[items])
    table = query_rows(
        starts, lo=lo, hi=hi, hi_slope=is_text, attend=np.where(is_text, ALL_KINDS, 1 << kind)
    )
    mask = AttentionMask(table, _key_table(starts, kind), length, length)
    if window is None:
        return mask
    # A window narrows only the past of text. Modality tokens keep their interval as the second one,
    # which a window leaves unchanged.
    return _protect(mask, ~is_text, starts).windowed(window)


def prepended(
    span_lengths: Sequence[tuple[int, int]], text_length: int, *, isolate: bool = False
) -> AttentionMask:
    """Return the EP mask: encoder outputs, as (kind, tokens) in order, followed by ``text_length``
    tokens of text. ``isolate`` as in :func:`multimodal`."""
    starts, stops = consecutive([tokens for _, tokens in span_lengths], "span")
    spans = [
        Span(int(start), int(stop), kind)
        for start, stop, (kind, _) in zip(starts, stops, span_lengths, strict=True)
    ]
    length = (spans[-1].stop if spans else 0) + text_length
    return multimodal(length, spans, isolate=isolate)


def embedded(length: int, spans: Sequence[Span], *, isolate: bool = False) -> AttentionMask:
    """Return the EE mask: encoder outputs at their positions in the text; see :func:`multimodal`.
    """
    return multimodal(length, spans, isolate=isolate)


def packed(
    document_lengths: Sequence[int], spans: Sequence[Span], *, isolate: bool = False
) -> AttentionMask:
    """Return the MP mask: several multimodal documents in one sequence. Spans use positions of the
    sequence; see :func:`multimodal`."""
    return multimodal(
        int(sum(document_lengths)), spans, isolate=isolate, document_lengths=document_lengths
    )


def causal_with_own_image(
    length: int,
    spans: Sequence[Span],
    *,
    document_lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> AttentionMask:
    """Return a causal mask in which an image's tokens also see their whole image (Gemma 3). A
    window (tokens, the row included) narrows the past but not the image."""
    starts, items, ends = layout(length, spans, document_lengths)
    item_starts, item_stops, kinds = span_arrays(spans)
    table = query_rows(
        starts,
        lo=ends[0],
        hi=1,
        hi_slope=1,
        lo2=np.where(items < 0, 0, item_starts[items]),
        hi2=np.where(items < 0, 0, item_stops[items]),
    )
    # Every row attends to every kind. The kinds hide no key and are set for pictures only.
    keys = _key_table(starts, np.where(items < 0, TEXT, kinds[items]))
    return _with_window(AttentionMask(table, keys, length, length), window)


def prefix_causal(
    length: int, prefix_lengths: Sequence[int], document_lengths: Sequence[int] | None = None
) -> AttentionMask:
    """Return a causal mask in which each document's prefix (image and prompt) sees itself in full
    (PaliGemma).

    Args:
        prefix_lengths: tokens of the prefix of each document.

    Raises:
        ModelError: the number of prefixes differs from that of documents, or a prefix is longer
            than its document.
    """
    lengths = [length] if document_lengths is None else list(document_lengths)
    if len(prefix_lengths) != len(lengths) or any(
        not 0 <= prefix <= total for prefix, total in zip(prefix_lengths, lengths, strict=False)
    ):
        raise ModelError(
            f"prefix_lengths must be one per document, each at most its document's length: "
            f"got {list(prefix_lengths)} for documents of {lengths}"
        )
    starts, stops = consecutive(lengths, "document")
    check_total(stops, length)
    hi2 = starts + np.asarray(prefix_lengths, dtype=np.int64)
    # Rows of a prefix see all of it; for later rows it is part of the past.
    table = query_rows(starts, lo=starts, hi=1, hi_slope=1, lo2=starts, hi2=hi2)
    return _mask(table, length, length)


def sinks_and_window(length: int, sinks: int = 64, window: int = 4096) -> AttentionMask:
    """Return the lambda mask: each token sees the first ``sinks`` and last ``window`` tokens,
    causally."""
    # A row among the sinks must not see later sinks, so its second interval ends at the row.
    sink_stop = min(sinks, length)
    table = query_rows(
        [0, sink_stop],
        lo=0,
        hi=1,
        hi_slope=1,
        hi2=[1, sink_stop],
        hi2_slope=[1, 0],
    )
    return _mask(table, length, length).windowed(window)


def causal_blockwise(length: int, block: int = 256, local: int = 2) -> AttentionMask:
    """Return a causal mask in which blocks of ``block`` tokens see the first block and the last
    ``local`` blocks, their own included. The last block sees all earlier tokens (in-context
    learning with many examples)."""
    if block < 1 or local < 1:
        raise ModelError(f"block and local must be at least 1, got {block} and {local}")
    starts = np.arange(0, length, block)
    lo = np.maximum(starts - (local - 1) * block, 0)
    lo[-1:] = 0
    hi2 = np.where(starts >= block, block, 0)
    return _mask(query_rows(starts, lo=lo, hi=1, hi_slope=1, hi2=hi2), length, length)


def shared_question(question: int, answers: Sequence[int]) -> AttentionMask:
    """Return the mask of a question and answers that see the question and themselves, but no other
    answer (reward models, preference training). Lengths are in tokens."""
    starts, stops = consecutive([question, *answers], "answer")
    length = int(stops[-1])
    hi2 = np.where(starts >= question, question, 0)
    return _mask(query_rows(starts, lo=starts, hi=1, hi_slope=1, hi2=hi2), length, length)


def cross_images(
    length: int,
    image_positions: Sequence[int],
    image_tokens: Sequence[int],
    *,
    document_lengths: Sequence[int] | None = None,
    only_last: bool = True,
) -> AttentionMask:
    """Return a cross-attention mask from text to image features. A text token sees the last image
    before it (Flamingo §3.1.3), or all earlier images of its document (``only_last=False``). Rows
    without an earlier image see no key.

    Args:
        length: text tokens (rows).
        image_positions: position in the text of every image, ascending.
        image_tokens: keys of every image.
        document_lengths: text lengths of packed documents.
    """
    positions = np.asarray(image_positions, dtype=np.int64)
    if len(positions) != len(image_tokens) or (np.diff(positions) < 0).any():
        raise ModelError("image_positions must ascend and have one entry per entry of image_tokens")
    if len(positions) and not (0 <= positions[0] and positions[-1] < length):
        raise ModelError(f"image_positions must be within [0, {length}), got {positions.tolist()}")
    lengths = [length] if document_lengths is None else document_lengths
    document_starts, document_stops = consecutive(lengths, "document")
    check_total(document_stops, length)
    key_starts, key_stops = consecutive(image_tokens, "image")
    starts = np.unique(np.concatenate([document_starts, positions]))
    starts = starts[starts < length]
    last = np.searchsorted(positions, starts, side="right") - 1
    document = np.searchsorted(document_starts, starts, side="right") - 1
    first = np.searchsorted(positions, document_starts[document], side="left")
    sees = last >= first
    key_starts, key_stops = np.append(key_starts, 0), np.append(key_stops, 0)
    lo = np.where(sees, key_starts[last if only_last else first], 0)
    hi = np.where(sees, key_stops[last], 0)
    return _mask(query_rows(starts, lo=lo, hi=hi), length, int(sum(image_tokens)))


def _mask(table: np.ndarray, n_queries: int, n_keys: int) -> AttentionMask:
    """Return a mask with one kind of key."""
    keys = np.array([[0, 1]]) if n_keys else np.zeros((0, 2), dtype=np.int64)
    return AttentionMask(table[table[:, 0] < max(n_queries, 0)], keys, n_queries, n_keys)


def _with_window(mask: AttentionMask, window: int | None) -> AttentionMask:
    return mask if window is None else mask.windowed(window)


def _key_table(starts: np.ndarray, kind: np.ndarray) -> np.ndarray:
    return np.stack([starts, np.left_shift(1, kind)], axis=1)


def _protect(mask: AttentionMask, rows: np.ndarray, starts: np.ndarray) -> AttentionMask:
    """Move the first interval of the segments of ``rows`` to the second."""
    table = mask.query_table.copy()
    picked = rows[np.searchsorted(starts, table[:, 0], side="right") - 1]
    for first, second in ((2, 4), (3, 5), (6, 8), (7, 9)):
        table[picked, second], table[picked, first] = table[picked, first], 0
    return AttentionMask(table, mask.key_table, mask.n_queries, mask.n_keys)
