"""Items and rows of a process among those that split them."""


from types import SimpleNamespace

import pytest
import torch

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.item_shares import (
    ITEMS,
    ItemShares,
    RowShares,
    rows_of_share,
    sample_rows,
    share_of_rows,
    text_grid,
)
from raymm.errors import ModelError
from raymm.kernels.shared_draws import Cut
from raymm.scheduler.graph.sample_ranges import Range

LENGTHS = [2, 3, 1, 4]


def layout():
    layout = torch.zeros(3, 4, 4, dtype=torch.int16)
    for row, length in enumerate(LENGTHS):
        layout[2, row, length:] = -1
    return layout


@pytest.mark.parametrize("packing", [False, True])
def test_shares_of_rows_are_the_numbers_of_one_process(packing):
    merged = {"targets": torch.zeros(4, 4), "token_layout": layout()}
    numbers = torch.arange(sum(LENGTHS))[None] if packing else torch.arange(16).view(4, 4)
    parts = []
    for rows in (range(0, 1), range(1, 4)):
        drawn = rows_of_share(rows, merged, packing)
        shape = (1, sum(LENGTHS[rows.start : rows.stop])) if packing else (len(rows), 4)
        grid = text_grid(MicrobatchContext(1), shape, drawn, None, packing)
        parts.append(grid.tokens.take(grid.rows.take(numbers, 0), 1))
        assert parts[-1].shape == shape
    assert torch.equal(torch.cat(parts, 1 if packing else 0), numbers)


def test_samples_of_a_stage_have_their_rows():
    context = MicrobatchContext(1, sample_count=3, samples=(Range(1, 3),))
    assert sample_rows(context, "llm", 2) == Cut(2, 3, ((1, 3),))
    context = context._replace(offsets={"vision": [0, 2, 2, 5]})
    assert sample_rows(context, "vision", 3) == Cut(3, 5, ((2, 5),))
    assert share_of_rows(Cut(3, 5, ((2, 5),)), 1, 2) == Cut(2, 5, ((3, 5),))
    assert sample_rows(MicrobatchContext(1), "llm", 4).is_uncut


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
