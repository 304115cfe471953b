"""Masks from what a user has: spans of images and audio, documents, windows, answers.

Every builder returns an :class:`AttentionMask` of a few segments. The patterns of Cornstarch
v2 (Fig. 7, App. C and F): :func:`prepended` (EP), :func:`embedded` (EE), :func:`packed` (MP),
:func:`sinks_and_window` (lambda), :func:`causal_blockwise`, :func:`shared_question`.
Gemma 3 and PaliGemma: :func:`causal_with_own_image`, :func:`prefix_causal`. Flamingo:
:func:`cross_images`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raymm.errors import ModelError
from raymm.kernels.mask.mask import ALL_KINDS, AttentionMask, query_rows
from raymm.kernels.mask.spans import TEXT, Span, check_total, consecutive, layout, span_arrays


def full(n_queries: int, n_keys: int | None = None) -> AttentionMask:
    """Every row sees every key."""
    n_keys = n_queries if n_keys is None else n_keys
    return _mask(query_rows([0], hi=n_keys), n_queries, n_keys)


def causal(length: int, window: int | None = None) -> AttentionMask:
    """Every token sees itself and what is before it; with a window, the last ``window`` of
    that (Mistral, Gemma)."""
    return _with_window(_mask(query_rows([0], hi=1, hi_slope=1), length, length), window)


def documents(lengths: Sequence[int], *, causal: bool = True) -> AttentionMask:
    """Documents packed one after another; a token sees its own document only, causally or
    (``causal=False``) whole.

    Raises:
        ModelError: a negative length.
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
    """Encoder outputs among text (Cornstarch v2, Fig. 7): a text token sees all that is before
    it in its document, a modality token the tokens of its own encoder and nothing else.

    Args:
        length: T.
        spans: items in order of position, not overlapping; the rest is text.
        isolate: a modality token sees its own item only, not the encoder's other items.
        document_lengths: lengths of packed documents, T together; nothing is seen across them.
            Default: one document.
        window: narrows what text sees of its past.

    Raises:
        ModelError: spans that overlap, leave the sequence or cross a document's end; a kind
            outside 1 to 62; lengths that do not add up to T.
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
    # Only text looks back; modality tokens see their items whole. Their interval moves to the
    # second place, which a window leaves alone.
    return _protect(mask, ~is_text, starts).windowed(window)


def prepended(
    span_lengths: Sequence[tuple[int, int]], text_length: int, *, isolate: bool = False
) -> AttentionMask:
    """EP: encoder outputs, as (kind, tokens) in order, then text.

    Args:
        span_lengths: (kind, tokens) of every item, in order.
        text_length: tokens of the text after them.
        isolate: a modality token sees its own item only, not the encoder's other items.
    """
    starts, stops = consecutive([tokens for _, tokens in span_lengths], "span")
    spans = [
        Span(int(start), int(stop), kind)
        for start, stop, (kind, _) in zip(starts, stops, span_lengths, strict=True)
    ]
    length = (spans[-1].stop if spans else 0) + text_length
    return multimodal(length, spans, isolate=isolate)


def embedded(length: int, spans: Sequence[Span], *, isolate: bool = False) -> AttentionMask:
    """EE: encoder outputs where the text has them.

    Args:
        length: T, tokens.
        spans: where items lie among the tokens, ascending.
        isolate: a modality token sees its own item only, not the encoder's other items.
    """
    return multimodal(length, spans, isolate=isolate)


def packed(
    document_lengths: Sequence[int], spans: Sequence[Span], *, isolate: bool = False
) -> AttentionMask:
    """MP: several multimodal documents in one sequence; spans in positions of the whole.

    Args:
        document_lengths: tokens of each document.
        spans: where items lie among the tokens, ascending.
        isolate: a modality token sees its own item only, not the encoder's other items.
    """
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
    """Causal, and a token of an image sees the whole of its image (Gemma 3). A window narrows
    the past, not the image.

    Args:
        length: T, tokens.
        spans: where items lie among the tokens, ascending.
        document_lengths: tokens of each packed document; one document if not given.
        window: tokens that a row sees at most, itself counted; None for all.
    """
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
    # Every row attends to every kind: the kinds of keys hide nothing, but pictures show them.
    keys = _key_table(starts, np.where(items < 0, TEXT, kinds[items]))
    return _with_window(AttentionMask(table, keys, length, length), window)


def prefix_causal(
    length: int, prefix_lengths: Sequence[int], document_lengths: Sequence[int] | None = None
) -> AttentionMask:
    """Each document's prefix (image and prompt) sees itself whole, the rest is causal
    (PaliGemma).

    Args:
        prefix_lengths: tokens of the prefix, per document.
        length: T, tokens.
        document_lengths: tokens of each packed document; one document if not given.

    Raises:
        ModelError: as many prefixes as there are not documents, or one longer than its document.
    """
    lengths = [length] if document_lengths is None else list(document_lengths)
    if len(prefix_lengths) != len(lengths) or any(
        not 0 <= prefix <= whole for prefix, whole in zip(prefix_lengths, lengths, strict=False)
    ):
        raise ModelError(
            f"prefix_lengths must be one per document, each at most its document's length: "
            f"got {list(prefix_lengths)} for documents of {lengths}"
        )
    starts, stops = consecutive(lengths, "document")
    check_total(stops, length)
    hi2 = starts + np.asarray(prefix_lengths, dtype=np.int64)
    # The rows of a prefix see it whole; later rows see it as a part of their past.
    table = query_rows(starts, lo=starts, hi=1, hi_slope=1, lo2=starts, hi2=hi2)
    return _mask(table, length, length)


def sinks_and_window(length: int, sinks: int = 64, window: int = 4096) -> AttentionMask:
    """Lambda: the first ``sinks`` tokens and the last ``window``, causally.

    Args:
        length: T, tokens.
        sinks: tokens at the beginning that all later ones see.
        window: tokens before it that a row sees, itself counted.
    """
    # A row among the sinks sees no later sink: the second interval stops at the row too.
    within = min(sinks, length)
    table = query_rows(
        [0, within],
        lo=0,
        hi=1,
        hi_slope=1,
        hi2=[1, within],
        hi2_slope=[1, 0],
    )
    return _mask(table, length, length).windowed(window)


def causal_blockwise(length: int, block: int = 256, local: int = 2) -> AttentionMask:
    """Blocks of tokens see the first block and the last ``local`` blocks, their own included,
    causally; the last block sees all before it (in-context learning with many examples).

    Args:
        length: T, tokens.
        block: tokens of a block.
        local: blocks that a row sees, its own counted.
    """
    if block < 1 or local < 1:
        raise ModelError(f"block and local must be at least 1, got {block} and {local}")
    starts = np.arange(0, length, block)
    lo = np.maximum(starts - (local - 1) * block, 0)
    lo[-1:] = 0
    hi2 = np.where(starts >= block, block, 0)
    return _mask(query_rows(starts, lo=lo, hi=1, hi_slope=1, hi2=hi2), length, length)


def shared_question(question: int, answers: Sequence[int]) -> AttentionMask:
    """One question, then answers that see the question and themselves, not one another
    (reward models, preference training); lengths in tokens."""
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
    """Cross attention from text to image features: a text token sees the image that came last
    before it (Flamingo §3.1.3), or all of its document's images that came before it.

    Args:
        length: text tokens (rows).
        image_positions: position in the text of every image, ascending.
        image_tokens: keys of every image.
        document_lengths: text lengths of packed documents.
        only_last: whether text sees the last image before it only.

    Rows without an image before them see nothing.
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
    """A mask with one kind of key."""
    keys = np.array([[0, 1]]) if n_keys else np.zeros((0, 2), dtype=np.int64)
    return AttentionMask(table[table[:, 0] < max(n_queries, 0)], keys, n_queries, n_keys)


def _with_window(mask: AttentionMask, window: int | None) -> AttentionMask:
    return mask if window is None else mask.windowed(window)


def _key_table(starts: np.ndarray, kind: np.ndarray) -> np.ndarray:
    return np.stack([starts, np.left_shift(1, kind)], axis=1)


def _protect(mask: AttentionMask, rows: np.ndarray, starts: np.ndarray) -> AttentionMask:
    """Move the first interval of the segments of ``rows`` to the second place."""
    table = mask.query_table.copy()
    picked = rows[np.searchsorted(starts, table[:, 0], side="right") - 1]
    for first, second in ((2, 4), (3, 5), (6, 8), (7, 9)):
        table[picked, second], table[picked, first] = table[picked, first], 0
    return AttentionMask(table, mask.key_table, mask.n_queries, mask.n_keys)
