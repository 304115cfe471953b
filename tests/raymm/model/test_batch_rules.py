"""Microbatches are completed, and refused with the entry and its first wrong value."""

import pytest
import torch

from raymm.errors import DataError
from raymm.model.batch_rules import Vocabulary, complete_microbatch


def batch(**changes):
    ids = torch.tensor([[0, 3, 4], [5, 6, 7]])
    return {"input_ids": ids, "labels": ids.clone(), **changes}


def complete(microbatch):
    return complete_microbatch(microbatch, ["vision"], Vocabulary(8, 8))


def test_a_mask_is_added_and_absent_modalities_left_out():
    completed = complete(batch(vision=None))
    assert completed["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert "vision" not in completed


def test_padding_on_the_left_is_moved_right():
    mask = torch.tensor([[False, True, True], [True, True, True]])
    labels = torch.tensor([[-100, 3, 4], [5, 6, 7]])
    completed = complete(batch(attention_mask=mask, labels=labels))
    assert completed["input_ids"].tolist() == [[3, 4, 0], [5, 6, 7]]
    assert completed["labels"].tolist() == [[3, 4, -100], [5, 6, 7]]
    assert completed["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"audio": None}, "the batch has 'audio'"),
    ({"input_ids": None}, "input_ids is "),
    ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "with at least one row and one token"),
    ({"input_ids": torch.tensor([[0, 8, 1], [0, 0, 0]])},
     "input_ids[0, 1] is 8; accepted: 0 to 7, the model's vocabulary"),
    ({"labels": torch.full((2, 3), -101)}, "labels[0, 0] is -101; accepted: 0 to 7"),
    ({"labels": torch.zeros(2, 2, dtype=torch.int64)}, "labels is "),
    ({"attention_mask": torch.full((2, 3), float("nan"))}, "attention_mask is "),
    ({"attention_mask": torch.full((2, 3), 2)}, "attention_mask[0, 0] is 2; accepted: 1 for a"),
    ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
      "labels": torch.full((2, 3), -100)}, "attention_mask[0] has 2 runs of 1"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "attention_mask[1] has no 1"),
    ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
     "labels[0, 2] is 4 where attention_mask is 0; accepted: -100 for padding"),
])  # fmt: skip
def test_other_entries_are_refused_by_name(changes, reason):
    with pytest.raises(DataError) as error:
        complete(batch(**changes))
    assert reason in str(error.value)
