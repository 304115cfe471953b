"""Spans from per-token kinds and items."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from raymm.kernels.mask.spans import kinds_and_items
from tests.kernels.mask.test_patterns import layouts


@given(layouts())
def test_spans_of_kinds_and_items(layout):
    lengths, spans = layout
    kinds, items = np.zeros(sum(lengths), dtype=int), np.zeros(sum(lengths), dtype=int)
    for number, span in enumerate(spans, 1):
        kinds[span.start : span.stop], items[span.start : span.stop] = span.kind, number
    assert kinds_and_items(kinds, items) == spans
