"""Masks of cross attention equal dense ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import ModelError
from raymm.kernels.mask.cross_masks import BLIND_ROWS, cross_masks


@given(
    length=st.integers(1, 30), items=st.integers(1, 9), tokens=st.integers(1, 5),
    share=st.floats(0, 1), seed=st.integers(0, 1000), blind=st.sampled_from(BLIND_ROWS),
)  # fmt: skip
def test_rows_see_the_items_that_they_are_shown(length, items, tokens, share, seed, blind):
    generator = torch.Generator().manual_seed(seed)
    shown = torch.rand(3, length, items, generator=generator) < share
    # Runs of equal rows, as in text.
    rows = torch.randint(0, length, (length,), generator=generator).sort().values
    shown = torch.cat([shown[:, rows], shown[:1, rows]])
    masks = cross_masks(shown.long(), tokens, blind=blind)
    for mask, one in zip(masks, shown, strict=True):
        due = one.repeat_interleave(tokens, dim=1)
        if blind == "everything":
            due = due | ~one.any(dim=1, keepdim=True)
        assert torch.equal(mask.dense(), due)
    assert masks[0] is masks[3]


def test_invalid_cross_masks_are_refused():
    shown = torch.ones(1, 4, 2)
    for wrong, said in (
        (lambda: cross_masks(shown[0], 5), r"must be \(B, T, I\)"),
        (lambda: cross_masks(shown, 0), "tokens_per_item must be at least 1, got 0"),
        (lambda: cross_masks(shown, 5, blind="some"), "nothing, everything, got 'some'"),
    ):
        with pytest.raises(ModelError, match=said):
            wrong()
