"""Items of different sizes on the processes that split them."""

import pytest
import torch

from raymm.actors.sharding.vlm.item_rows import items_of_share, share_lengths
from raymm.errors import ModelError


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_items_of_zeros_belong_to_no_row(processes):
    pixels = torch.zeros(6, 2, 3)
    real = [0, 3, 4]
    pixels[real] = 1
    shown, counts = [], []
    for place in range(processes):
        own, count = items_of_share("vision", {"pixel_values": pixels}, place, processes, True)
        # a process without items works on another's
        assert len(own["pixel_values"]) == max(count, 1)
        assert bool((own["pixel_values"] == 1).all())
        counts.append(count)
    assert sum(counts) == len(real) and max(counts) - min(counts) <= 1
    for place in range(processes):
        shown += [items_of_share("vision", {"pixel_values": pixels}, place, processes)[1]]
    assert sum(shown) == len(pixels)


def test_outputs_of_joined_items_are_split_by_items_or_patches():
    shares = [
        {"pixel_values": torch.zeros(patches, 2), "image_grid_thw": torch.ones(items, 3)}
        for patches, items in ((8, 1), (16, 3))
    ]
    assert share_lengths("vision", shares, [4, 6, 24]) == [[1, 3], [2, 4], [8, 16]]
    with pytest.raises(ModelError, match="features of 'vision' have 5 rows"):
        share_lengths("vision", shares, [5])
