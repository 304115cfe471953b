"""Layouts of tokens over ranks, and the keys and masks of a rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import ModelError
from raymm.kernels.context_parallel.layout import (
    ContextLayout,
    indices,
    join_ranges,
    local_masks,
    needed_keys,
    ranges_of,
)
from raymm.kernels.mask.patterns import causal, documents


@st.composite
def layouts(draw) -> ContextLayout:
    """Draw blocks of tokens, each on any rank."""
    block, length = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    ranks = draw(st.integers(1, 4))
    owners = [draw(st.integers(0, ranks - 1)) for _ in range(-(-length // block))]
    return ContextLayout.of_blocks(
        [[b for b, owner in enumerate(owners) if owner == rank] for rank in range(ranks)],
        block, length,
    )


@given(layouts())
def test_every_token_has_one_rank(layout):
    positions = [layout.positions(rank) for rank in range(layout.num_ranks)]
    assert torch.cat(positions).sort().values.tolist() == list(range(layout.length))
    assert tuple(map(len, positions)) == layout.sizes
    for rank, own in enumerate(positions):
        assert torch.equal(own, own.sort().values)
        local = layout.local(rank, layout.ranges[rank])
        assert local.tolist() == list(range(len(own)))


@given(st.integers(0, 40), st.integers(1, 7))
def test_even_layouts_differ_by_one_token(length, ranks):
    sizes = ContextLayout.even(length, ranks).sizes
    assert sum(sizes) == length and max(sizes) - min(sizes) <= 1


@given(st.lists(st.booleans(), max_size=20))
def test_ranges_of_chosen_tokens(chosen):
    ranges = ranges_of(torch.tensor(chosen, dtype=torch.bool).numpy())
    assert indices(ranges).tolist() == [n for n, one in enumerate(chosen) if one]
    assert join_ranges(ranges) == ranges
    assert join_ranges([(n, n + 1) for n, one in enumerate(chosen) if one]) == ranges


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((((0, 2),), ((3, 4),)), "tokens 2 to 3 have no rank"),
        ((((0, 3),), ((2, 4),)), "tokens 2 to 3 are on two ranks"),
        ((((2, 4), (0, 2)),), "a rank's ranges must ascend"),
    ],
)
def test_layouts_with_gaps_are_rejected(ranges, message):
    with pytest.raises(ModelError, match=message):
        ContextLayout(ranges)


@given(layouts(), st.sampled_from(["causal", "documents"]), st.data())
def test_a_rank_needs_the_keys_that_its_rows_see(layout, pattern, data):
    length = layout.length
    first = causal(length) if pattern == "causal" else documents([length // 2, -(-length // 2)])
    masks = (first, causal(length, 2), first)
    me, other = (data.draw(st.integers(0, layout.num_ranks - 1)) for _ in range(2))
    rows, keys = layout.ranges[me], layout.ranges[other]
    seen = torch.stack([mask.dense() for mask in masks])[:, indices(rows)].any(dim=(0, 1))
    expected = [k for k in indices(keys).tolist() if seen[k]]
    assert indices(needed_keys(masks, rows, keys)).tolist() == expected
    local = local_masks(masks, rows, keys)
    for mask, part in zip(masks, local, strict=True):
        assert torch.equal(part.dense(), mask.dense()[indices(rows)][:, indices(keys)])
    assert local[0] is local[2]
