"""Exchange of items between samples, compared with its rules."""

import pytest
import torch

from raymm.data.loading.shuffle import shuffle_modality


def microbatch(owners):
    index = torch.tensor(owners)
    return {
        "input_ids": torch.zeros(8, 1),
        "vision": {"pixels": torch.arange(len(owners)) * 10, "sample_index": index},
    }


@pytest.mark.parametrize("owners", [[0, 1], [0, 0, 1, 1], [2, 0, 1, 0, 3], [0, 1, 1, 2, 3, 3]])
@pytest.mark.parametrize("seed", range(4))
def test_no_item_stays_with_its_sample(owners, seed):
    before = microbatch(owners)
    after = shuffle_modality(before, "vision", torch.Generator().manual_seed(seed))
    moved = (after["vision"]["pixels"] // 10).tolist()
    assert sorted(moved) == list(range(len(owners)))
    assert all(owners[item] != owner for item, owner in zip(moved, owners, strict=True))
    assert after["vision"]["sample_index"].tolist() == owners
    assert before["vision"]["pixels"].tolist() == [10 * i for i in range(len(owners))]


def test_as_few_items_as_possible_stay():
    moved = shuffle_modality(microbatch([0, 0, 0, 1]), "vision")["vision"]["pixels"] // 10
    owners = torch.tensor([0, 0, 0, 1])
    assert int((owners[moved] == owners).sum()) == 2


@pytest.mark.parametrize("seed", range(8))
def test_both_rows_of_a_pair_get_the_same_items(seed):
    pixels = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]).flatten()
    owners = torch.arange(6).repeat_interleave(2)
    batch = {"vision": {"pixels": pixels, "sample_index": owners}}
    after = shuffle_modality(batch, "vision", torch.Generator().manual_seed(seed), rows=2)
    moved = after["vision"]["pixels"].view(3, 2, 2)
    assert bool((moved[:, 0] == moved[:, 1]).all())
    assert bool((moved != pixels.view(3, 2, 2)).all())


def test_a_microbatch_without_the_modality_is_unchanged():
    batch = microbatch([0, 1])
    assert shuffle_modality(batch, "audio") is batch
