"""Other forms of a mask convert back to it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.gpu.every_mask import every_pattern
from raymm.errors import ModelError
from raymm.kernels.mask.convert import (
    BLIND_ROWS,
    CAUSAL_BIT,
    cross_masks,
    from_bitfield,
    from_block_mask,
    from_dense,
    to_bitfield,
    to_block_mask,
)
from raymm.kernels.mask.patterns import causal, documents, embedded, full
from raymm.kernels.mask.spans import Span
from tests.support.random_masks import same_tables, tables

BLOCK = 16


def slow_bitfield(field: torch.Tensor) -> torch.Tensor:
    """Return the paper's form, pair by pair, as two sets."""
    size = len(field)
    visible = torch.zeros(size, size, dtype=torch.bool)
    for q in range(size):
        for k in range(size):
            attend = int(field[q]) & ~CAUSAL_BIT
            is_text = int(field[k]) < 0
            identity = 1 if is_text else int(field[k])
            visible[q, k] = bool(attend & identity) and (int(field[q]) >= 0 or k <= q)
    return visible


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=16))
def test_a_bit_field_means_two_sets(tokens):
    field = torch.tensor([bits | (CAUSAL_BIT if is_text else 0) for bits, is_text in tokens])
    mask = from_bitfield(field)
    assert torch.equal(mask.dense(), slow_bitfield(field))


@pytest.mark.parametrize("name", every_pattern(57))
def test_a_pattern_becomes_a_bit_field_or_is_refused(name):
    mask = every_pattern(57)[name]()
    says_it = {"full", "causal", "ep", "ee"}
    try:
        field = to_bitfield(mask)
    except ModelError as error:
        assert name not in says_it, error
        return
    assert field.dtype == torch.int64
    assert torch.equal(slow_bitfield(field), mask.dense())
    assert same_tables(from_bitfield(field), mask) or torch.equal(
        from_bitfield(field).dense(), mask.dense()
    )


@pytest.mark.parametrize("mask", [full(6), causal(6), embedded(9, [Span(2, 5, 1), Span(5, 9, 2)])])
def test_bit_fields_round_trip(mask):
    assert torch.equal(slow_bitfield(to_bitfield(mask)), mask.dense())


@pytest.mark.parametrize(
    ("mask", "row"), [(documents([3, 3]), 3), (causal(9, 2), 2), (full(3, 4), None)]
)
def test_masks_beyond_bit_fields_name_the_row(mask, row):
    with pytest.raises(ModelError, match="self attention" if row is None else f"row {row} "):
        to_bitfield(mask)


@given(tables(40, 40))
def test_any_table_comes_back_from_its_dense_form(mask):
    assert torch.equal(from_dense(mask.dense()).dense(), mask.dense())


@pytest.mark.parametrize("name", every_pattern(144))
def test_dense_patterns_convert_to_short_tables(name):
    mask = every_pattern(144)[name]()
    back = from_dense(mask.dense())
    assert torch.equal(back.dense(), mask.dense())
    assert len(back.query_table) <= 3 * len(mask.query_table)


def test_a_dense_mask_of_too_many_kinds_is_refused():
    noise = torch.from_numpy(np.random.default_rng(0).random((96, 200)) < 0.5)
    with pytest.raises(ModelError, match="kinds of keys"):
        from_dense(noise)
    with pytest.raises(ModelError, match="bool"):
        from_dense(torch.ones(3, 3))


@pytest.mark.parametrize("name", every_pattern(57))
def test_block_masks_are_those_that_flex_attention_makes(name):
    mask = every_pattern(57)[name]()
    block_mask = to_block_mask(mask, block=BLOCK)
    expected = create_block_mask(
        block_mask.mask_mod, 1, 1, *mask.shape, device="cpu", BLOCK_SIZE=BLOCK
    )
    assert torch.equal(block_mask.to_dense(), expected.to_dense())
    assert torch.equal(from_block_mask(block_mask).dense(), mask.dense())


def test_a_batch_of_block_masks_keeps_its_masks_apart():
    masks = [causal(40), documents([10, 30])]
    block_mask = to_block_mask(masks, batch=2, block=BLOCK)
    for number, mask in enumerate(masks):
        assert torch.equal(from_block_mask(block_mask, batch=number).dense(), mask.dense())


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
