"""Items and rows of a process among those that split them."""

from types import SimpleNamespace

import pytest
import torch

from raymm.actors.stages.item_shares import ITEMS, ItemShares, RowShares
from raymm.errors import ModelError

SIZE = 3


def places():
    return [SimpleNamespace(rank=rank, size=SIZE) for rank in range(SIZE)]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_item_is_on_one_process(count):
    inputs, seen = {"pixels": torch.arange(count), "scale": 2}, []
    for place in places():
        shares = ItemShares("vision", place)
        own, items = shares.own_inputs(inputs)
        indices = shares.own({ITEMS: torch.tensor(count)})
        assert items == count and own["scale"] == 2
        assert own["pixels"].tolist() == (list(indices) or [0])  # item 0 if it has none
        seen += indices
    assert seen == list(range(count))


def test_features_without_a_row_per_item_are_named():
    shares = ItemShares("vision", places()[0])
    with pytest.raises(ModelError, match=r"'vision' .* of shape \(5, 2\) for 1 items"):
        shares.whole(torch.zeros(5, 2), {ITEMS: torch.tensor(3)})


@pytest.mark.parametrize("together", [1, 2])
def test_rows_of_a_pair_stay_on_one_process(together):
    merged = {"targets": torch.arange(8)[:, None], "token_layout": torch.zeros(3, 8, 1)}
    taken = []
    for place in places():
        rows = RowShares(together)
        assert not rows.is_split and rows.own(8) == range(8)
        assert rows.take(merged, False) == (merged, None)
        rows.share(place)
        own, drawn = rows.take(merged, False)
        assert own["targets"].flatten().tolist() == list(rows.own(8))
        assert drawn.tolist() == [rows.own(8).start, 8]
        assert rows.own(8).start % together == 0
        taken += rows.own(8)
    assert taken == list(range(8))
