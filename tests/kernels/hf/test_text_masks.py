"""Masks over all tokens of a batch, masks of packed rows, and answers from host copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils

from raymm.kernels.hf.text_masks import (
    AllTokens,
    KnownMask,
    enter_masks_of,
    no_packed_rows,
    put_together,
    tokens_of_all,
)
from raymm.kernels.host_copies import remember
from raymm.kernels.mask.patterns import causal, full


def test_masks_cover_the_innermost_tokens():
    outer, inner = AllTokens(1, 8), AllTokens(2, 4)
    assert tokens_of_all() is None
    leave_outer = enter_masks_of(outer)
    leave_inner = enter_masks_of(inner)
    assert tokens_of_all() is inner
    leave_inner()
    assert tokens_of_all() is outer
    leave_outer()
    assert tokens_of_all() is None


@pytest.mark.parametrize("window", [None, 2])
def test_packed_rows_see_themselves_only(window):
    tokens = AllTokens(1, 5, documents=(2, 3))
    dense = tokens.packed_mask(window).dense()
    for q in range(5):
        for k in range(5):
            together = (q < 2) == (k < 2) and k <= q
            assert bool(dense[q, k]) == (together and (window is None or q - k < window))


@given(st.data())
def test_the_mask_of_packed_rows_is_that_of_their_tokens(data):
    length, rows = 6, 3
    kept = [sorted(data.draw(st.sets(st.integers(0, length - 1)))) for _ in range(rows)]
    tokens = torch.tensor(
        [row * length + column for row in range(rows) for column in kept[row]], dtype=torch.int64
    )
    masks = tuple(data.draw(st.sampled_from([causal, full]))(length) for _ in range(rows))
    if data.draw(st.booleans()):
        masks = masks[:1]
    found = put_together(masks, tokens, length).dense()
    for i, q in enumerate(tokens.tolist()):
        mask = masks[q // length if len(masks) > 1 else 0].dense()
        for j, k in enumerate(tokens.tolist()):
            visible = q // length == k // length and bool(mask[q % length, k % length])
            assert bool(found[i, j]) == visible


def test_a_known_mask_answers_from_the_host():
    """The mask lies on the meta device, which has no values to read."""
    host = torch.tensor([[1, 1], [1, 0]])
    mask = torch.empty_like(host, device="meta").as_subclass(KnownMask)
    remember(mask, host)
    assert int(mask.sum()) == 3 and not bool(mask.all())
    cast = mask.to(torch.bool)
    assert isinstance(cast, KnownMask) and not bool(cast.all())
    assert not isinstance(mask + 1, KnownMask)
    assert KnownMask.of(host, torch.device("cpu")) is host


def test_packed_rows_are_searched_only_if_there_may_be_some():
    jumps = torch.tensor([[0, 1, 0, 1]])
    with no_packed_rows(True):
        assert masking_utils.find_packed_sequence_indices(jumps) is None
        with no_packed_rows(False):
            assert masking_utils.find_packed_sequence_indices(jumps).tolist() == [[0, 0, 1, 1]]
    assert masking_utils.find_packed_sequence_indices(jumps) is not None
