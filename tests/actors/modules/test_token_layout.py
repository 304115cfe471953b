"""Layouts of tokens, and the masks of their rows."""

import numpy as np
import pytest
import torch

from raymm.actors.modules.token_layout import (
    MASKS,
    checked_layout,
    document_lengths,
    place_items,
    row_masks,
    text_layout,
)
from raymm.errors import ModelError
from raymm.kernels.mask.mask import AttentionMask


def test_padding_is_the_last_document():
    layout = text_layout(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))
    assert layout[2].tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]
    assert document_lengths(layout) == ((3, 1), (4,))
    with pytest.raises(ValueError, match="not on the right"):
        text_layout(torch.tensor([[0, 1]]))


def test_items_are_numbered_within_their_row():
    layout = text_layout(torch.ones(2, 6))
    places = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]).bool()
    place_items(layout, places, kind=2, tokens_per_item=2)
    assert layout[0].tolist() == [[0, 2, 2, 2, 2, 0], [2, 2, 0, 0, 0, 0]]
    assert layout[1].tolist() == [[0, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("isolated", [False, True])
def test_masks_of_items_and_documents(isolated):
    layout = torch.zeros(3, 1, 8, dtype=torch.int16)
    layout[1] = torch.tensor([[0, 1, 1, 2, 0, 0, 1, 0]])
    layout[0] = layout[1] > 0
    layout[2] = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    (mask,) = row_masks(layout, MASKS["multimodal_isolated" if isolated else "multimodal"])
    expected = np.zeros((8, 8), bool)
    (_, items, documents) = layout[:, 0].tolist()
    for query in range(8):
        for key in range(8):
            seen = items[key] > 0 and (not isolated or items[query] == items[key])
            seen = seen if items[query] else key <= query
            expected[query, key] = documents[query] == documents[key] and seen
    assert np.array_equal(np.asarray(mask.dense()), expected)


def test_equal_rows_share_a_mask():
    masks = row_masks(text_layout(torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]])), MASKS["causal"])
    assert masks[0] is masks[2] is not masks[1]


def test_a_wrong_policy_and_layout_are_named():
    def wrong(length, spans, document_lengths) -> AttentionMask:
        return MASKS["causal"](length + 1, spans, document_lengths=[length + 1])

    with pytest.raises(ModelError, match="mask policy wrong returned .* for a row of 2 tokens"):
        row_masks(text_layout(torch.ones(1, 2)), wrong)
    with pytest.raises(ValueError, match=r"of shape \(3, 1, 2\); expected \(3, 1, 3\)"):
        checked_layout(torch.zeros(3, 1, 2), (1, 3))
    with pytest.raises(ValueError, match="16 bits"):
        checked_layout(torch.full((3, 1, 2), 2**15), (1, 2))
