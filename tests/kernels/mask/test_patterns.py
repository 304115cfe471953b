"""Every pattern equals its definition, written as loops over pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import ModelError
from raymm.kernels.mask import patterns
from raymm.kernels.mask.spans import Span, kinds_and_items
from tests.support.random_masks import same_tables


def dense(n_queries: int, n_keys: int, visible: Callable[[int, int], bool]) -> torch.Tensor:
    rows = [[bool(visible(q, k)) for k in range(n_keys)] for q in range(n_queries)]
    return torch.tensor(rows, dtype=torch.bool).view(n_queries, n_keys)


def document_of(lengths: list[int]) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


@st.composite
def layouts(draw) -> tuple[list[int], list[Span]]:
    """Draw document lengths and spans within documents; some are adjacent."""
    lengths = draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    spans, offset = [], 0
    for length in lengths:
        cuts = sorted(draw(st.lists(st.integers(0, length), min_size=0, max_size=6)))
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
            if start < stop:
                kind = draw(st.integers(1, 3))
                spans.append(Span(offset + start, offset + stop, kind))
        offset += length
    return lengths, spans


def item_of(length: int, spans: list[Span]) -> list[int]:
    items = [-1] * length
    for number, span in enumerate(spans):
        items[span.start : span.stop] = [number] * (span.stop - span.start)
    return items


@given(layouts(), st.booleans(), st.none() | st.integers(1, 9))
def test_multimodal(layout, isolate, window):
    """Check that text is causal in its document, and modality tokens see their encoder or item."""
    lengths, spans = layout
    length = sum(lengths)
    document, item = document_of(lengths), item_of(length, spans)

    def visible(q: int, k: int) -> bool:
        if document[q] != document[k]:
            return False
        if item[q] < 0:
            return k <= q and (window is None or k > q - window)
        if isolate:
            return item[k] == item[q]
        return item[k] >= 0 and spans[item[k]].kind == spans[item[q]].kind

    mask = patterns.multimodal(
        length, spans, isolate=isolate, document_lengths=lengths, window=window
    )
    assert torch.equal(mask.dense(), dense(length, length, visible))


@given(layouts(), st.none() | st.integers(1, 9))
def test_causal_with_own_image(layout, window):
    lengths, spans = layout
    length = sum(lengths)
    document, item = document_of(lengths), item_of(length, spans)

    def visible(q: int, k: int) -> bool:
        own = item[q] >= 0 and item[q] == item[k]
        past = k <= q and (window is None or k > q - window)
        return document[q] == document[k] and (own or past)

    mask = patterns.causal_with_own_image(
        length, spans, document_lengths=lengths, window=window
    )
    assert torch.equal(mask.dense(), dense(length, length, visible))
    assert not mask.needs_bits


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_prefix_causal(documents):
    prefixes = [min(pair) for pair in documents]
    lengths = [max(pair) for pair in documents]
    length, document = sum(lengths), document_of(lengths)
    start = np.cumsum([0, *lengths])

    def visible(q: int, k: int) -> bool:
        in_prefix = all(x - start[document[x]] < prefixes[document[x]] for x in (q, k))
        return document[q] == document[k] and (k <= q or in_prefix)

    mask = patterns.prefix_causal(length, prefixes, lengths)
    assert torch.equal(mask.dense(), dense(length, length, visible))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans())
def test_documents(lengths, causal):
    document = document_of(lengths)
    expected = dense(
        sum(lengths), sum(lengths),
        lambda q, k: document[q] == document[k] and (k <= q or not causal),
    )  # fmt: skip
    assert torch.equal(patterns.documents(lengths, causal=causal).dense(), expected)


@given(st.integers(0, 30), st.integers(1, 12))
def test_causal_and_window(length, window):
    assert torch.equal(
        patterns.causal(length).dense(), dense(length, length, lambda q, k: k <= q)
    )
    assert torch.equal(
        patterns.causal(length, window).dense(),
        dense(length, length, lambda q, k: q - window < k <= q),
    )
    assert bool(patterns.full(length, window).dense().all())


@given(st.integers(0, 40), st.integers(0, 8), st.integers(1, 8))
def test_sinks_and_window(length, sinks, window):
    mask = patterns.sinks_and_window(length, sinks, window)
    expected = dense(length, length, lambda q, k: k <= q and (k < sinks or k > q - window))
    assert torch.equal(mask.dense(), expected)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3))
def test_causal_blockwise(length, block, local):
    last = (length - 1) // block

    def visible(q: int, k: int) -> bool:
        near = q // block - k // block < local
        return k <= q and (near or k < block or q // block == last)

    mask = patterns.causal_blockwise(length, block, local)
    assert torch.equal(mask.dense(), dense(length, length, visible))


@given(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=5))
def test_shared_question(question, answers):
    part = document_of([question, *answers])
    length = len(part)
    expected = dense(
        length, length, lambda q, k: k <= q and (part[k] == part[q] or part[k] == 0)
    )
    assert torch.equal(patterns.shared_question(question, answers).dense(), expected)


@given(st.data(), st.booleans())
def test_cross_images(data, only_last):
    """Check that a text token sees the last image before it in its document, or all earlier ones.
    """
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    length = sum(lengths)
    places = st.integers(0, max(length - 1, 0))
    positions = sorted(data.draw(st.lists(places, max_size=4))) if length else []
    tokens = [data.draw(st.integers(0, 5)) for _ in positions]
    document, image = document_of(lengths), document_of(tokens)

    def visible(q: int, k: int) -> bool:
        seen = [
            i for i, p in enumerate(positions) if p <= q and document[p] == document[q]
        ]
        return image[k] in (seen[-1:] if only_last else seen)

    mask = patterns.cross_images(
        length, positions, tokens, document_lengths=lengths, only_last=only_last
    )
    assert torch.equal(mask.dense(), dense(length, sum(tokens), visible))


def test_ep_ee_and_mp_equal_the_papers_figure():
    """Compare with Cornstarch v2, Fig. 7: outputs before the text, among it, and packed."""
    ep = patterns.prepended([(1, 3), (2, 2)], 4)
    assert same_tables(ep, patterns.embedded(9, [Span(0, 3, 1), Span(3, 5, 2)]))
    assert ep.dense()[5:].tolist() == torch.ones(4, 9).tril(5).bool().tolist()
    mp = patterns.packed([5, 4], [Span(1, 3, 1), Span(6, 8, 1)])
    assert not mp.dense()[5:, :5].any() and not mp.dense()[:5, 5:].any()


def test_text_sees_images_before_it_and_images_see_no_later_text():
    spans = [Span(2, 5, 1), Span(7, 9, 1)]
    for isolate in (False, True):
        seen = patterns.embedded(12, spans, isolate=isolate).dense()
        assert seen[5, :6].all() and seen[9, 2:10].all()
        assert not seen[2:5, 5:7].any() and not seen[7:9, 9:].any() and not seen[2:5, :2].any()
        assert bool(seen[2:5, 7:9].any()) is not isolate


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: patterns.multimodal(9, [Span(2, 5), Span(4, 6)]), "not overlap"),
        (lambda: patterns.multimodal(9, [Span(5, 10)]), r"within \[0, 9\)"),
        (lambda: patterns.multimodal(9, [Span(5, 4)]), r"within \[0, 9\)"),
        (lambda: patterns.multimodal(9, [Span(1, 2, 63)]), "1 to 62"),
        (lambda: patterns.multimodal(9, [Span(1, 2, 0)]), "1 to 62"),
        (lambda: patterns.packed([4, 5], [Span(3, 6)]), "crosses the end"),
        (lambda: patterns.multimodal(9, [], document_lengths=[4, 4]), "add up to 8"),
        (lambda: patterns.documents([3, -1]), "must not be negative"),
        (lambda: patterns.prefix_causal(9, [4, 5]), "one per document"),
        (lambda: patterns.prefix_causal(9, [10]), "at most its document"),
        (lambda: patterns.causal_blockwise(9, 0), "at least 1"),
        (lambda: patterns.cross_images(9, [4, 2], [1, 1]), "ascend"),
        (lambda: patterns.cross_images(9, [9], [1]), r"within \[0, 9\)"),
        (lambda: patterns.causal(9, 0), "window must be at least 1"),
        (lambda: kinds_and_items([1, 2], [1]), r"must be \(T,\)"),
    ],
)
def test_impossible_patterns_are_refused(build, said):
    with pytest.raises(ModelError, match=said):
        build()
