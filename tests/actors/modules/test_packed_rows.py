"""Rows of a microbatch as one row of documents."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.modules.message import ROUTED_TOKENS
from raymm.actors.modules.packed_rows import pack_rows

rows_of_documents = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4
)


@given(rows_of_documents)
def test_real_tokens_follow_each_other_in_order(rows) -> None:
    B, T = len(rows), max(map(sum, rows))
    layout = torch.zeros(3, B, T, dtype=torch.int16)
    layout[2] = -1
    tokens = []  # (row, position, number of the document in the packed row)
    document = 0
    for row, lengths in enumerate(rows):
        position = 0
        for number, length in enumerate(lengths):
            layout[2, row, position : position + length] = number
            tokens += [(row, n, document) for n in range(position, position + length)]
            position, document = position + length, document + 1
    embeds, targets = torch.randn(B, T, 2), torch.arange(B * T).view(B, T)
    merged = {
        "inputs_embeds": embeds, "targets": targets, ROUTED_TOKENS: targets % 2 == 0, "mask": None,
    }
    packed = pack_rows(merged, layout)
    expected = {
        "inputs_embeds": torch.stack([embeds[row, n] for row, n, _ in tokens])[None],
        "targets": torch.tensor([[int(targets[row, n]) for row, n, _ in tokens]]),
        ROUTED_TOKENS: torch.tensor([[bool(targets[row, n] % 2 == 0) for row, n, _ in tokens]]),
        "position_ids": torch.tensor([[n for _, n, _ in tokens]]),
    }
    assert packed["token_layout"][2].tolist() == [[number for _, _, number in tokens]]
    del packed["token_layout"]
    torch.testing.assert_close(packed, expected, rtol=0, atol=0)


def test_position_ids_of_several_axes_are_packed() -> None:
    layout = torch.tensor([[[0, 0]], [[0, 0]], [[0, -1]]], dtype=torch.int16)
    positions = torch.arange(6).view(3, 1, 2)
    merged = {"inputs_embeds": torch.zeros(1, 2, 4), "targets": torch.zeros(1, 2)}
    packed = pack_rows({**merged, "position_ids": positions}, layout)
    assert packed["position_ids"].tolist() == [[[0]], [[2]], [[4]]]


def test_an_unknown_entry_is_named() -> None:
    with pytest.raises(ValueError, match=r"returned \['bias'\]; accepted"):
        pack_rows({"bias": torch.zeros(1)}, torch.zeros(3, 1, 1, dtype=torch.int16))
