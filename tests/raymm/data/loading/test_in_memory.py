"""Splitting of batches in memory, and the order of their items."""

import pytest
import torch

from raymm.data.loading.in_memory import items_by_row, split_batch
from raymm.errors import DataError


def batch(index, **tensors):
    return {
        "input_ids": torch.arange(8).view(4, 2),
        "vision": {"sample_index": torch.tensor(index), **tensors},
    }


def test_microbatches_have_the_rows_and_their_items():
    index, pixels = [3, 0, 1, 0], torch.tensor([30, 0, 10, 1])
    parts = split_batch(batch(index, pixels=pixels), 2)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), torch.arange(8).view(4, 2))
    first, second = (part["vision"] for part in parts)
    assert first["pixels"].tolist() == [0, 10, 1] and first["sample_index"].tolist() == [0, 1, 0]
    assert second["pixels"].tolist() == [30] and second["sample_index"].tolist() == [1]


def test_a_part_without_items_lacks_the_modality():
    first, second = split_batch(batch([0, 1], pixels=torch.zeros(2)), 2)
    assert "vision" in first and "vision" not in second


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(DataError, match="has 4 rows, which is not divisible by num_microbatches=3"):
        split_batch(batch([0]), 3)
    with pytest.raises(DataError, match=r"'pixels' of 'vision' has shape \(3, 2\) for 2 items"):
        split_batch(batch([0, 1], pixels=torch.zeros(3, 2)), 2)


def test_items_are_sorted_by_row_and_stay_in_their_order():
    ordered = items_by_row(batch([2, 0, 2, 1], pixels=torch.tensor([20, 0, 21, 10])))
    assert ordered["vision"]["pixels"].tolist() == [0, 10, 20, 21]
    assert ordered["vision"]["sample_index"].tolist() == [0, 1, 2, 2]
